/** Faults in German. */

import type { Sentences, Unsafe } from "../agent/faults.js";

const UNSAFE: Record<Unsafe, string> = {
  training: "ein eigenes Training",
  functions: "Funktionen",
  outside: "Werte in einer anderen Datei",
  domain: "Operatoren der Domäne",
  nested: "zu viele Graphen in Graphen",
  "not-onnx": "Bytes, die kein ONNX sind",
};

const shape = (sizes: readonly number[]): string => `(n${sizes.map((size) => `, ${size}`).join("")})`;
const listed = (names: readonly string[]): string =>
  names.length === 0 ? "keine" : names.map((name) => `„${name}“`).join(", ");

const unsafe = (why: string): string =>
  `Dieses Gerät hat die sichere Summe der Runde verlassen, weil der Koordinator eine Regel verletzt hat: ${why}. ` +
  "Das Ergebnis dieses Geräts wurde nicht verraten. Wenn das noch einmal vorkommt, fragen Sie den Betreiber.";

export const GERMAN_FAULTS: Sentences = {
  "bundle.altered-file": ({ file }) =>
    `${file} hat einen anderen Inhalt, als der Koordinator angekündigt hat. Die Datei wurde verworfen.`,
  "bundle.altered-file/manifest": ({ file }) => `${file} ist nicht die Datei, die das Manifest beschreibt.`,
  "bundle.malformed": ({ where }) =>
    `Der Koordinator hat Arbeit geschickt, die diese Seite nicht verwenden kann (${where}).`,
  "bundle.malformed/version": ({ found, known }) =>
    `Der Koordinator hat Arbeit der Version ${found} geschickt, aber diese Seite liest Version ${known}. Laden Sie ` +
    "die Seite neu.",
  "bundle.malformed/runtime": ({ runtime }) =>
    `Der Koordinator hat Arbeit für ${runtime} geschickt, aber eine Seite braucht ONNX-Graphen.`,
  "bundle.malformed/private": () =>
    "Die Föderation trainiert mit Differential Privacy für Beispiele, die diese Seite nicht beherrscht. Es wurde " +
    "nichts trainiert. Verwenden Sie das Agentenprogramm auf einem Computer.",
  "bundle.unreadable-tensors": ({ file }) =>
    `${file} ist beschädigt: Die Zahlen der Datei sind nicht lesbar.`,
  "bundle.unsafe-graph": ({ file, found, domain }) =>
    `${file} wurde nicht geöffnet: Der Graph enthält ${UNSAFE[found]}${domain && ` '${domain}'`}. Exportierte ` +
    "Graphen enthalten das nie. Fragen Sie den Betreiber, woher diese Datei kommt.",
  "bundle.wrong-graph": ({ port, signature }) =>
    `Der Koordinator hat Arbeit geschickt, die sich widerspricht: „${port}“ von ${signature} steht nur im ` +
    "Graphen oder nur im Manifest.",
  "client.away/unreachable": () => "Der Koordinator ist nicht erreichbar.",
  "client.away/broke-off": () => "Die Verbindung zum Koordinator ist abgebrochen.",
  "client.away/silent": () => "Der Koordinator antwortet nicht.",
  "client.away/status": ({ status }) => `Der Koordinator ist im Moment nicht erreichbar (HTTP ${status}).`,
  "client.away/preparing": () =>
    "Der Koordinator bereitet die Föderation noch vor. Beim ersten Mal dauert das einige Minuten.",
  "client.away/busy": () => "Der Koordinator ist ausgelastet.",
  "client.not-a-coordinator": ({ origin }) => `${origin} hat nicht wie ein Koordinator geantwortet.`,
  "client.not-a-coordinator/status": ({ origin, status }) =>
    `${origin} hat nicht wie ein Koordinator geantwortet (HTTP ${status}).`,
  "client.not-a-coordinator/samples": ({ origin }) =>
    `${origin} verlangt Daten einer Art, die diese Seite nicht kennt. Laden Sie die Seite neu.`,
  "client.too-long": ({ origin }) =>
    `${origin} hat mehr geschickt als angekündigt. Die Antwort wurde nicht verwendet.`,
  "data.label-out-of-range": ({ name, label, highest }) =>
    `${name}: Das Label ${label} liegt außerhalb der Klassen 0 bis ${highest} des Modells.`,
  "data.missing": () => "Diese Seite hat keine Daten. Wählen Sie welche aus.",
  "data.missing-array": ({ file }) =>
    `${file} muss die Arrays x (Beispiele) und y (Labels) enthalten. Speichern Sie die Datei mit ` +
    "numpy.savez(file, x=x, y=y).",
  "data.missing-array/several": ({ name, arrays }) =>
    `${name} muss ${arrays.length === 1 ? "das Array" : "die Arrays"} ${listed(arrays)} enthalten. Speichern Sie die ` +
    "Datei mit numpy.savez.",
  "data.missing-array/x": ({ file }) =>
    `${file} muss das Array x mit mindestens einem Beispiel enthalten. Speichern Sie die Datei mit ` +
    "numpy.savez(file, x=x).",
  "data.missing-column": ({ file, column, columns }) =>
    `${file} hat keine Spalte „${column}“. Die erste Zeile muss die Spalten nennen; sie nennt ${listed(columns)}.`,
  "data.missing-column/several": ({ file, column, columns }) =>
    `${file} hat mehrere Spalten „${column}“. Die erste Zeile nennt ${listed(columns)}.`,
  "data.missing-file": () => "Es wurde keine Datei ausgewählt.",
  "data.no-labels": ({ name, ignored }) =>
    `${name}: Alle Labels sind ${ignored}. Solche Labels zählen nicht, also gibt es nichts zu trainieren.`,
  "data.not-a-number": ({ file, line, column, text }) =>
    `${file}, Zeile ${line}: ${column} ist „${text}“; es muss eine Zahl sein, zum Beispiel -1.5. Berichtigen ` +
    "oder entfernen Sie die Zeile.",
  "data.not-a-number/mixed": ({ file, line, column, text }) =>
    `${file}, Zeile ${line}: ${column} ist „${text}“, aber Zahlen davor haben das andere Dezimalzeichen. Schreiben ` +
    "Sie alle Zahlen einer Datei mit Punkt oder alle mit Komma.",
  "data.not-a-sequence": ({ name, sample, ignored }) =>
    `${name}: Mit dem Verlust ctc müssen die Labels eines Beispiels andere Klassen als 0 (das Leerzeichen) sein, am ` +
    `Ende aufgefüllt mit ${ignored}. Beispiel ${sample} (ab 0 gezählt) verletzt diese Regel.`,
  "data.not-prepared": () => "Diese Föderation nimmt Dateien dieser Art nicht an.",
  "data.nothing-new": () => "Diese Seite hat diese Dateien schon: Es wurde nichts hinzugefügt.",
  "data.number-out-of-range": ({ name, sample }) =>
    `${name}: Beispiel ${sample} (ab 0 gezählt) enthält eine Zahl, die das Modell nicht annimmt. Berichtigen ` +
    "oder entfernen Sie das Beispiel.",
  "data.other-form": ({ name }) =>
    `Die Beispiele in ${name} haben eine andere Form als die Beispiele dieser Seite. Wählen Sie die Datei noch ` +
    "einmal aus, ohne die vorhandenen Beispiele zu behalten.",
  "data.other-preparation": () =>
    "Diese Föderation bereitet Daten jetzt anders auf. Wählen Sie Ihre Daten noch einmal aus.",
  "data.too-few-samples": ({ lines }) =>
    `Ein Beispiel für das Modell braucht ${lines} Zeilen hintereinander. Keine Datei hat so viele Zeilen. ` +
    "Wählen Sie längere Dateien.",
  "data.too-few-samples/same-label": ({ lines }) =>
    `Ein Beispiel für das Modell braucht ${lines} Zeilen hintereinander mit demselben Label. Keine Datei hat so ` +
    "viele. Wählen Sie längere Dateien.",
  "data.unknown-class": ({ file, line, text, classes }) =>
    `${file}, Zeile ${line}: „${text}“ ist keine Klasse. Es muss eine von diesen sein: ${listed(classes)}.`,
  "data.unknown-class/number": ({ file, line, text }) =>
    `${file}, Zeile ${line}: „${text}“ ist keine Klasse. Es muss die Nummer einer Klasse sein, zum Beispiel 0.`,
  "data.unreadable": ({ file }) =>
    `${file} ist keine vollständige Datei von numpy (.npz). Speichern Sie sie mit numpy.savez, und wählen Sie ` +
    "sie noch einmal aus.",
  "data.unreadable/fortran": ({ file }) =>
    `${file} enthält ein Array in Fortran-Ordnung. Speichern Sie es mit numpy.ascontiguousarray.`,
  "data.unreadable-file/gone": ({ file }) =>
    `${file} ist nicht mehr lesbar. Wenn die Datei in einer Cloud liegt, laden Sie sie zuerst auf dieses Gerät.`,
  "data.unreadable-file/csv": ({ file }) =>
    `${file} ist keine CSV-Datei in UTF-8. Speichern Sie sie als „CSV UTF-8“.`,
  "data.unreadable-file/quotation": ({ file }) =>
    `${file} enthält ein Anführungszeichen ("), das nicht geschlossen ist. Berichtigen Sie die Datei.`,
  "data.unreadable-file/picture": ({ file }) => `${file} ist kein Bild, das dieser Browser lesen kann.`,
  "data.unreadable-file/large-picture": ({ file, width, height }) =>
    `${file} hat ${width} x ${height} Pixel, zu viele für diese Seite.`,
  "data.wrong-shape/count": ({ name, samples, labels, least }) =>
    samples === labels
      ? `Das Modell braucht mindestens ${least} Beispiele; ${name} hat ${samples}.`
      : `${name} hat ${samples} Beispiele und ${labels} Labels. Die Datei braucht so viele Labels wie Beispiele.`,
  "data.wrong-shape/x": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: x muss ${wanted} der Form ${shape(wantedShape)} sein; es ist ${found} der Form ${shape(foundShape)}.`,
  "data.wrong-shape/y": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: y muss ${wanted} der Form ${shape(wantedShape)} sein; es ist ${found} der Form ${shape(foundShape)}.`,
  "data.wrong-type": ({ file, type }) =>
    `${file} enthält ein Array des Typs ${type}. Verwenden Sie x.astype(numpy.float32) für Zahlen und ` +
    "y.astype(numpy.int64) für Klassen.",
  "page.fault": ({ message }) => `Etwas Unvorhergesehenes ist passiert: ${message}`,
  "page.fault/pictures": () => "Dieser Browser kann keine Bilder lesen.",
  refused: ({ message }) => message,
  "leave.untold": ({ device, id }) =>
    "Auf diesem Gerät ist alles gelöscht. Der Koordinator hat nicht geantwortet, also zählt er dieses Gerät noch als " +
    `Mitglied. Sagen Sie dem Betreiber, dass „${device}“ (${id}) ausgestiegen ist.`,
  "release.no-inference-bundle": () =>
    "Die neue Fassung enthält kein Modell für Vorhersagen, deshalb ist sie nicht verwendbar.",
  "release.no-room": ({ needed, free }) =>
    `Die neue Fassung braucht ${needed} Bytes, aber diese Seite darf nur noch ${free} speichern. Die Seite versucht ` +
    "es in einer Stunde noch einmal.",
  "release.worse": ({ reason }) => reason,
  "storage.disk-full": () =>
    "Der Browser hat keinen Platz mehr für diese Seite. Geben Sie Speicher frei, und machen Sie dann weiter.",
  "storage.lost": () => "Der Browser hat eine Datei dieser Seite gelöscht.",
  "storage.lost/data": () => "Der Browser hat die Daten dieser Seite gelöscht.",
  "storage.lost/model": () =>
    "Der Browser hat das Modell dieser Seite gelöscht. Wenn noch eine Runde kommt, erhält diese Seite das Modell " +
    "wieder.",
  "trial.no-memory": () =>
    "Dieses Gerät hat im Moment zu wenig Arbeitsspeicher für das Modell. Schließen Sie andere Tabs und Apps, laden " +
    "Sie diese Seite neu, und versuchen Sie es noch einmal.",
  "trial.no-model": () => "Auf diesem Gerät ist noch kein Modell. Es kommt mit der ersten Runde.",
  "trial.training": () =>
    "Dieses Gerät trainiert gerade. Probieren Sie das Modell aus, wenn das Training wartet, Pause hat oder fertig ist.",
  "trust.forged-invitation": () =>
    "Die Beschreibung dieser Föderation ist nicht von ihrem Koordinator unterschrieben: Jemand hat sie " +
    "unterwegs verändert.",
  "trust.forged-key": () =>
    "Es kam ein neuer Schlüssel, den Ihr Koordinator nicht unterschrieben hat: Jemand hat ihn unterwegs verändert. " +
    "Es wurde nichts geändert.",
  "trust.forged-release": ({ number }) =>
    `Fassung ${number} ist nicht von Ihrem Koordinator unterschrieben: Jemand hat sie unterwegs verändert. Es wurde ` +
    "nichts geändert.",
  "trust.forged-work": () =>
    "Es kam Arbeit, die Ihr Koordinator nicht unterschrieben hat: Jemand hat sie unterwegs verändert. Es wurde " +
    "nichts trainiert.",
  "trust.forged-work/group": () =>
    "Die Liste der Geräte einer sicheren Summe ist nicht von Ihrem Koordinator unterschrieben: Jemand hat sie " +
    "unterwegs verändert. Es wurde nichts gesendet.",
  "trust.late-key": () =>
    "Der Koordinator hat einen neuen Schlüssel, und diese Seite kann nicht mehr zu ihm wechseln. Bitten Sie um einen " +
    "neuen Link, und treten Sie damit bei. Prüfen Sie auch das Datum dieses Geräts.",
  "trust.unclippable": () =>
    "Die Änderung dieses Geräts lässt sich nicht begrenzen, weil Zahlen des Koordinators nicht endlich sind oder " +
    "weil die Gruppe der Geräte zu groß ist. Es wurde nichts gesendet. Fragen Sie den Betreiber.",
  "trust.less-noise": ({ promised, noise }) =>
    `Am Anfang hatten sichere Summen das ${promised}-fache Rauschen. Jetzt verlangt der Koordinator eine Summe mit ` +
    `dem ${noise}-fachen Rauschen. Es wurde nichts gesendet. Fragen Sie den Betreiber. Wenn Sie einverstanden sind, ` +
    "steigen Sie aus, und treten Sie wieder bei.",
  "trust.no-secure-sum": () =>
    "Der Koordinator verlangt das Ergebnis dieses Geräts, aber diese Föderation hatte bisher sichere Summen, die " +
    "kein einzelnes Ergebnis verraten. Es wurde nichts gesendet. Wenn Sie einverstanden sind, steigen Sie aus, und " +
    "treten Sie wieder bei.",
  "trust.old-release": ({ number }) =>
    `Das Angebot der Fassung ${number} ist älter als das neueste Angebot, das diese Seite kennt: Vielleicht hat ` +
    "jemand eine alte Nachricht noch einmal geschickt. Es wurde nichts geändert.",
  "trust.old-work": () =>
    "Die Arbeit ist unterschrieben, aber nicht aktuell: Vielleicht hat jemand alte Arbeit noch einmal geschickt. Es " +
    "wurde nichts trainiert. Prüfen Sie Datum und Uhrzeit dieses Geräts.",
  "trust.other-key": () =>
    "Das ist nicht der Koordinator des Links: Sein Schlüssel ist ein anderer. Bitten Sie um " +
    "einen neuen Link.",
  "trust.single-figures": () =>
    "Der Koordinator fragt, wie gut das Modell bei Ihren Beispielen ist, aber diese Föderation hat sichere Summen, " +
    "die keine Angabe eines einzelnen Geräts verraten. Es wurde nichts gesendet. Wenn Sie einverstanden sind, " +
    "steigen Sie aus, und treten Sie wieder bei.",
  "trust.unsafe-sum/altered-shares": ({ device }) =>
    unsafe(`Die Schlüsselteile von ${device} wurden verändert oder sind für eine andere Gruppe`),
  "trust.unsafe-sum/few-confirmations": ({ confirmed, needed }) =>
    unsafe(`Nur ${confirmed} Geräte der Gruppe haben dieselbe Summe bestätigt, aber nötig sind ${needed}`),
  "trust.unsafe-sum/few-shares": ({ held, needed }) =>
    unsafe(
      `Nur ${held} Geräte haben Schlüsselteile voneinander, aber ${needed} sind nötig, um die Masken zu entfernen`,
    ),
  "trust.unsafe-sum/left-out": () => unsafe("In der Summe fehlt das Ergebnis, das dieses Gerät gesendet hat"),
  "trust.unsafe-sum/no-group": () => unsafe("Er hat die Liste der Gruppe ausgelassen"),
  "trust.unsafe-sum/no-update-yet": () =>
    unsafe("Er hat die Geräte der Summe genannt, bevor dieses Gerät sein Ergebnis gesendet hatte"),
  "trust.unsafe-sum/other-devices": () => unsafe("Er hat andere Geräte der Summe genannt als vorher"),
  "trust.unsafe-sum/other-members": () =>
    unsafe("In der Summe ist ein Gerät doppelt, oder ein Gerät, das nicht zur Gruppe gehört"),
  "trust.unsafe-sum/other-neighbours": () =>
    unsafe("Er hat Schlüsselteile von Geräten geschickt, die keine Nachbarn dieses Geräts sind"),
  "trust.unsafe-sum/own-keys": () =>
    unsafe("In der Gruppe fehlen die Schlüssel dieses Geräts, oder sie wurden verändert"),
  "trust.unsafe-sum/shares-twice": () => unsafe("Er hat die Schlüsselteile desselben Versuchs zweimal verlangt"),
  "trust.unsafe-sum/small-group": ({ found, needed }) =>
    unsafe(`Die Gruppe hat ${found} Geräte, aber nötig sind ${needed}`),
  "trust.unsafe-sum/small-sum": ({ found, needed }) =>
    unsafe(`Die Summe hat ${found} Geräte, aber nötig sind ${needed}`),
  "trust.unsafe-sum/twice": () => unsafe("In der Gruppe ist ein Gerät oder ein Schlüssel doppelt"),
  "trust.unsafe-sum/unconfirmed": () =>
    unsafe("Er hat Schlüsselteile für eine andere Summe verlangt, als die Geräte bestätigt haben"),
  "trust.unsafe-sum/unsigned-keys": ({ device }) =>
    unsafe(
      `${device} hat seine Schlüssel nicht für diese Runde, diese Arbeit und diese Bedingungen unterschrieben, oder ` +
      "die Schlüssel sind nicht verwendbar",
    ),
  "trust.unsafe-sum/update-twice": () => unsafe("Er hat das Ergebnis desselben Versuchs zweimal verlangt"),
  "update.beyond-float16": ({ value }) =>
    `Aufgezeichnete Aktivierungen dürfen in float16 höchstens 65.504 sein, aber eine ist ${value}. Prüfen Sie die ` +
    "Daten. Wenn sie stimmen, braucht der Koordinator ein Teilmodell ohne recording=float16.",
  "update.diverged": () =>
    "Das Training ergab keine brauchbaren Zahlen. Vielleicht enthalten die Daten extreme Zahlen.",
  "update.not-finite": ({ tensor }) =>
    `Das Training ergab keine brauchbaren Zahlen in ${tensor}. Vielleicht enthalten die Daten extreme Zahlen.`,
};
