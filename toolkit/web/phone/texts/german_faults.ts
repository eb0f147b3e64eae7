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
  `Dieses Gerät macht in dieser Runde nicht weiter, weil der Koordinator eine Regel der sicheren Summe verletzt hat: ${why}. ` +
  "Sein Ergebnis wurde nicht verraten. Fragen Sie den Betreiber, wenn das noch einmal vorkommt.";

export const GERMAN_FAULTS: Sentences = {
  "bundle.altered-file": ({ file }) =>
    `${file} kam mit anderem Inhalt, als der Koordinator angekündigt hat. Die Datei wurde verworfen.`,
  "bundle.altered-file/manifest": ({ file }) => `${file} ist nicht die Datei, die das Manifest beschreibt.`,
  "bundle.malformed": ({ where }) =>
    `Der Koordinator hat Arbeit geschickt, die diese Seite nicht verwenden kann (${where}).`,
  "bundle.malformed/version": ({ found, known }) =>
    `Der Koordinator hat Arbeit der Version ${found} geschickt, diese Seite liest Version ${known}. Laden Sie ` +
    "die Seite neu.",
  "bundle.malformed/runtime": ({ runtime }) =>
    `Der Koordinator hat Arbeit für ${runtime} geschickt, eine Seite braucht ONNX-Graphen.`,
  "bundle.malformed/private": () =>
    "Die Föderation trainiert mit Differential Privacy für Beispiele, die diese Seite nicht beherrscht. Es wurde " +
    "nichts trainiert. Verwenden Sie den Agenten für Computer.",
  "bundle.unreadable-tensors": ({ file }) =>
    `${file} ist beschädigt: Die Zahlen darin sind nicht lesbar.`,
  "bundle.unsafe-graph": ({ file, found, domain }) =>
    `${file} wurde nicht geöffnet: Der Graph enthält ${UNSAFE[found]}${domain && ` '${domain}'`}, was kein ` +
    "Export enthält. Trainieren Sie das nicht, und fragen Sie, woher es kommt.",
  "bundle.wrong-graph": ({ port, signature }) =>
    `Der Koordinator hat Arbeit geschickt, die sich widerspricht: „${port}“ von ${signature} steht nur im ` +
    "Graphen oder nur im Manifest.",
  "client.away/unreachable": () => "Der Koordinator ist nicht erreichbar.",
  "client.away/broke-off": () => "Die Verbindung zum Koordinator ist abgebrochen.",
  "client.away/silent": () => "Der Koordinator antwortet nicht.",
  "client.away/status": ({ status }) => `Der Koordinator antwortet gerade nicht (HTTP ${status}).`,
  "client.away/preparing": () =>
    "Der Koordinator bereitet die Föderation noch vor. Beim ersten Mal dauert das Minuten.",
  "client.away/busy": () => "Der Koordinator ist ausgelastet.",
  "client.not-a-coordinator": ({ origin }) => `${origin} antwortet nicht wie ein Koordinator.`,
  "client.not-a-coordinator/status": ({ origin, status }) =>
    `${origin} antwortet mit HTTP ${status}, nicht wie ein Koordinator.`,
  "client.not-a-coordinator/samples": ({ origin }) =>
    `${origin} verlangt Daten einer Art, die diese Seite nicht kennt. Laden Sie die Seite neu.`,
  "client.too-long": ({ origin }) =>
    `${origin} hat mehr geschickt als angekündigt. Nichts davon wurde verwendet.`,
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
  "data.no-labels": ({ name, ignored }) => `${name}: Kein Label zählt; alle sind ${ignored}.`,
  "data.not-a-number": ({ file, line, column, text }) =>
    `${file}, Zeile ${line}: ${column} ist „${text}“; es muss eine Zahl sein, zum Beispiel -1.5. Berichtigen ` +
    "oder entfernen Sie die Zeile.",
  "data.not-a-number/mixed": ({ file, line, column, text }) =>
    `${file}, Zeile ${line}: ${column} ist „${text}“, aber Zahlen davor haben das andere Dezimalzeichen. Schreiben ` +
    "Sie alle Zahlen einer Datei mit Punkt oder alle mit Komma.",
  "data.not-a-sequence": ({ name, sample, ignored }) =>
    `${name}: Mit dem Verlust ctc sind die Labels eines Beispiels seine Folge, ohne 0 (das Leerzeichen), und ` +
    `dann ${ignored} bis zum Ende. Beispiel ${sample} (ab 0 gezählt) hat andere Labels.`,
  "data.not-prepared": () => "Diese Föderation nimmt solche Dateien nicht an.",
  "data.nothing-new": () => "Diese Seite hat diese Dateien schon: Es kam nichts hinzu.",
  "data.number-out-of-range": ({ name, sample }) =>
    `${name}: Beispiel ${sample} (ab 0 gezählt) enthält eine Zahl, die das Modell nicht annimmt. Berichtigen ` +
    "oder entfernen Sie das Beispiel.",
  "data.other-form": ({ name }) =>
    `${name} enthält Beispiele anderer Art als die, die diese Seite hat. Wählen Sie aus, ohne hinzuzufügen.`,
  "data.other-preparation": () =>
    "Diese Föderation bereitet Daten jetzt anders auf. Wählen Sie Ihre Daten noch einmal aus.",
  "data.too-few-samples": ({ lines }) =>
    `Ein Beispiel für das Modell sind ${lines} Zeilen hintereinander, und so viele haben die Dateien nicht. ` +
    "Wählen Sie längere Dateien.",
  "data.too-few-samples/same-label": ({ lines }) =>
    `Ein Beispiel für das Modell sind ${lines} Zeilen hintereinander mit demselben Label, und so viele haben ` +
    "die Dateien nicht. Wählen Sie längere Dateien.",
  "data.unknown-class": ({ file, line, text, classes }) =>
    `${file}, Zeile ${line}: „${text}“ ist keine Klasse. Erlaubt sind ${listed(classes)}.`,
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
    `${file} hat ${width} x ${height} Punkte, zu viele für diese Seite.`,
  "data.wrong-shape/count": ({ name, samples, labels, least }) =>
    samples === labels
      ? `Das Modell braucht mindestens ${least} Beispiele; ${name} hat ${samples}.`
      : `${name} hat ${samples} Beispiele und ${labels} Labels. Es müssen gleich viele sein.`,
  "data.wrong-shape/x": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: x muss ${wanted} der Form ${shape(wantedShape)} sein; es ist ${found} der Form ${shape(foundShape)}.`,
  "data.wrong-shape/y": ({ name, wanted, wantedShape, found, foundShape }) =>
    `${name}: y muss ${wanted} der Form ${shape(wantedShape)} sein; es ist ${found} der Form ${shape(foundShape)}.`,
  "data.wrong-type": ({ file, type }) =>
    `${file} enthält ein Array des Typs ${type}. Nehmen Sie x.astype(numpy.float32) für Zahlen und ` +
    "y.astype(numpy.int64) für Klassen.",
  "page.fault": ({ message }) => `Etwas Unvorhergesehenes ist passiert: ${message}`,
  "page.fault/pictures": () => "Dieser Browser kann keine Bilder lesen.",
  refused: ({ message }) => message,
  "leave.untold": ({ device, id }) =>
    "Auf diesem Gerät ist alles gelöscht. Der Koordinator hat nicht geantwortet und hält den Platz frei: Sagen " +
    `Sie dem Betreiber, dass „${device}“ (${id}) ausgestiegen ist.`,
  "release.no-inference-bundle": () => "Die neue Fassung kann nichts vorhersagen, deshalb wird sie nicht verwendet.",
  "release.no-room": ({ needed, free }) =>
    `Die neue Fassung braucht ${needed} Bytes, und diese Seite darf noch ${free} speichern. Der nächste Versuch ist in ` +
    "einer Stunde.",
  "release.worse": ({ reason }) => reason,
  "storage.disk-full": () =>
    "Der Browser hat keinen Platz mehr für diese Seite. Schaffen Sie Platz, und machen Sie dann weiter.",
  "storage.lost": () => "Der Browser hat eine Datei dieser Seite gelöscht.",
  "storage.lost/data": () => "Der Browser hat die Daten dieser Seite gelöscht.",
  "storage.lost/model": () =>
    "Der Browser hat das Modell dieser Seite gelöscht. Wenn noch Runden kommen, bringt die nächste es wieder.",
  "trial.no-memory": () =>
    "Dieses Gerät hat im Moment zu wenig Arbeitsspeicher für das Modell. Schließen Sie andere Tabs und Apps, laden " +
    "Sie diese Seite neu, und versuchen Sie es noch einmal.",
  "trial.no-model": () => "Auf diesem Gerät ist noch kein Modell. Es kommt mit der ersten Runde.",
  "trial.training": () =>
    "Dieses Gerät trainiert gerade. Probieren Sie das Modell aus, wenn es wartet, Pause hat oder fertig ist.",
  "trust.forged-invitation": () =>
    "Die Beschreibung dieser Föderation ist nicht von ihrem Koordinator unterschrieben: Jemand hat sie " +
    "unterwegs verändert.",
  "trust.forged-key": () =>
    "Der neue Schlüssel ist nicht von Ihrem Koordinator unterschrieben: Jemand hat ihn unterwegs verändert. Es wurde " +
    "nichts geändert.",
  "trust.forged-release": ({ number }) =>
    `Fassung ${number} ist nicht von Ihrem Koordinator unterschrieben: Jemand hat sie unterwegs verändert. Es wurde ` +
    "nichts geändert.",
  "trust.forged-work": () =>
    "Die Arbeit ist nicht von Ihrem Koordinator unterschrieben: Jemand hat sie unterwegs verändert. Es wurde " +
    "nichts trainiert.",
  "trust.forged-work/group": () =>
    "Die Liste der Geräte einer sicheren Summe ist nicht von Ihrem Koordinator unterschrieben: Jemand hat sie unterwegs " +
    "verändert. Es wurde nichts gesendet.",
  "trust.late-key": () =>
    "Der Koordinator hat einen neuen Schlüssel, und die Zeit für den Wechsel ist vorbei. Bitten Sie um einen neuen " +
    "Link, und treten Sie damit bei. Prüfen Sie auch das Datum dieses Geräts.",
  "trust.unclippable": () =>
    "Die Änderung dieses Geräts lässt sich nicht begrenzen, weil Zahlen des Koordinators nicht endlich sind oder die " +
    "Gruppe zu groß ist. Es wurde nichts gesendet. Fragen Sie den Betreiber.",
  "trust.less-noise": ({ promised, noise }) =>
    `Sichere Summen hatten anfangs das ${promised}-fache Rauschen, und der Koordinator verlangt eine Summe mit dem ` +
    `${noise}-fachen. Es wurde nichts gesendet. Fragen Sie den Betreiber. Wenn Sie einverstanden sind, verlassen Sie ` +
    "die Föderation, und treten Sie wieder bei.",
  "trust.no-secure-sum": () =>
    "Der Koordinator will das Ergebnis dieses Geräts sehen, aber diese Föderation hatte sichere Summen, die kein einzelnes " +
    "Ergebnis verraten. Es wurde nichts gesendet. Wenn Sie einverstanden sind, steigen Sie aus, und treten Sie wieder bei.",
  "trust.old-release": ({ number }) =>
    `Das Angebot der Fassung ${number} ist älter als eines, dem diese Seite schon gefolgt ist: Vielleicht hat jemand eine ` +
    "alte Nachricht noch einmal geschickt. Es wurde nichts geändert.",
  "trust.old-work": () =>
    "Die Arbeit ist unterschrieben, aber von einer anderen Zeit: Vielleicht wiederholt jemand eine alte. Es " +
    "wurde nichts trainiert. Prüfen Sie Datum und Uhrzeit dieses Geräts.",
  "trust.other-key": () =>
    "Das ist nicht der Koordinator, von dem der Link kommt: Sein Schlüssel ist ein anderer. Bitten Sie um " +
    "einen neuen Link.",
  "trust.single-figures": () =>
    "Der Koordinator fragt, wie gut das Modell bei Ihren Beispielen ist, aber diese Föderation hat sichere Summen, die " +
    "nichts über ein einzelnes Gerät verraten. Es wurde nichts gesendet. Wenn Sie einverstanden sind, steigen Sie aus, und " +
    "treten Sie wieder bei.",
  "trust.unsafe-sum/altered-shares": ({ device }) =>
    unsafe(`Die Teile von ${device} wurden verändert oder sind für eine andere Gruppe`),
  "trust.unsafe-sum/few-confirmations": ({ confirmed, needed }) =>
    unsafe(`Nur ${confirmed} Geräte haben dieselbe Summe bestätigt, nötig sind ${needed}`),
  "trust.unsafe-sum/few-shares": ({ held, needed }) =>
    unsafe(`Nur ${held} Geräte haben Teile voneinander, nötig sind ${needed}`),
  "trust.unsafe-sum/left-out": () => unsafe("In der Summe fehlt das Ergebnis, das dieses Gerät gesendet hat"),
  "trust.unsafe-sum/no-group": () => unsafe("Er hat die Liste der Gruppe ausgelassen"),
  "trust.unsafe-sum/no-update-yet": () =>
    unsafe("Er hat die Ergebnisse der Summe genannt, bevor dieses Gerät seines gesendet hatte"),
  "trust.unsafe-sum/other-devices": () => unsafe("Er hat andere Geräte der Summe genannt als vorher"),
  "trust.unsafe-sum/other-members": () =>
    unsafe("In der Summe ist ein Gerät doppelt, oder eines, das nicht zur Gruppe gehört"),
  "trust.unsafe-sum/other-neighbours": () => unsafe("Er hat Teile von Geräten geschickt, die keine Nachbarn sind"),
  "trust.unsafe-sum/own-keys": () => unsafe("In der Gruppe fehlen die Schlüssel dieses Geräts, oder sie wurden verändert"),
  "trust.unsafe-sum/shares-twice": () => unsafe("Er hat die Teile eines Versuchs zweimal verlangt"),
  "trust.unsafe-sum/small-group": ({ found, needed }) =>
    unsafe(`Die Gruppe hat ${found} Geräte, nötig sind ${needed}`),
  "trust.unsafe-sum/small-sum": ({ found, needed }) => unsafe(`Die Summe hat ${found} Geräte, nötig sind ${needed}`),
  "trust.unsafe-sum/twice": () => unsafe("In der Gruppe ist ein Gerät oder ein Schlüssel doppelt"),
  "trust.unsafe-sum/unconfirmed": () =>
    unsafe("Er hat Teile für eine andere Summe verlangt, als die Geräte bestätigt haben"),
  "trust.unsafe-sum/unsigned-keys": ({ device }) =>
    unsafe(`${device} hat seine Schlüssel nicht für diese Runde und diese Bedingungen unterschrieben, oder sie taugen nicht`),
  "trust.unsafe-sum/update-twice": () => unsafe("Er hat das Ergebnis eines Versuchs zweimal verlangt"),
  "update.beyond-float16": ({ value }) =>
    `Aufgezeichnete Aktivierungen dürfen in float16 höchstens 65.504 sein, eine ist ${value}. Prüfen Sie die ` +
    "Daten. Wenn sie stimmen, braucht der Koordinator ein Teilmodell ohne recording=float16.",
  "update.diverged": () =>
    "Das Training ergab keine brauchbaren Zahlen. Vielleicht enthalten die Daten extreme Zahlen.",
  "update.not-finite": ({ tensor }) =>
    `Das Training ergab keine brauchbaren Zahlen in ${tensor}. Vielleicht enthalten die Daten extreme Zahlen.`,
};
