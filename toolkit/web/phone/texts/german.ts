/** All texts that a person reads on the page, in German. */

import type { Words } from "./english.js";
import { GERMAN_FAULTS } from "./german_faults.js";

const PAGE: Words["page"] = {
  title: "EdgeTailor: mit diesem Gerät trainieren",
  shortTitle: "EdgeTailor",
  heading: "Mit diesem Gerät trainieren",
  noScript: "Diese Seite braucht JavaScript. Erlauben Sie es für diese Seite, und laden Sie sie neu.",
  opening: "Wird geöffnet",
  retryNow: "Jetzt versuchen",
  joinHeading: "Mitmachen",
  about:
    "Mehrere Geräte trainieren gemeinsam ein Modell. Jedes trainiert mit seinen eigenen Daten und " +
    "sendet nur, was es gelernt hat.",
  nameLabel: "Name dieses Geräts",
  nameDefault: "mein Handy",
  nameHelp: "Der Betreiber sieht diesen Namen.",
  join: "Mitmachen",
  sharesHeading: "Was dieses Gerät sendet",
  byClass: "Diese Anzahlen auch für jede Art von Beispielen senden",
  staysHeading: "Was immer auf diesem Gerät bleibt",
  staysData: "Ihre Daten",
  staysPersonal: "Ihr persönliches Modell, falls diese Föderation persönliche Modelle hat",
  staysKey: "der private Schlüssel, an dem der Koordinator dieses Gerät erkennt",
  tryHeading: "Das Modell ausprobieren",
  tryClasses: "Wahrscheinlichkeit jeder Klasse",
  tryStays: "Was Sie hier auswählen, bleibt auf diesem Gerät, und diese Seite speichert es nicht.",
  dataHeading: "Ihre Daten",
  picturesAbout: "Wählen Sie Bilder jeder Art aus, oder nehmen Sie welche auf. Sie bleiben auf diesem Gerät.",
  usePictures: "Diese Bilder verwenden",
  csvLabel: "Messungen (CSV)",
  otherData: "Eine Datei mit vorbereiteten Beispielen",
  fileLabel: "Datei mit Daten",
  fileHelp:
    "Eine numpy-Datei, deren Name auf .npz endet, mit den Arrays x (Beispiele) und y (Labels). " +
    "Eine Kopie bleibt auf diesem Gerät.",
  adding: "Die vorhandenen Beispiele behalten und neue hinzufügen",
  changeData: "Daten ändern oder hinzufügen",
  changeAbout: "Neue Daten werden ab der nächsten Runde verwendet.",
  operatorHeading: "Angaben für Fragen an den Betreiber",
  train: "Training starten",
  trainHeading: "Training",
  progressLabel: "Fortschritt in dieser Runde",
  pause: "Pause",
  choicesHeading: "Wann trainiert wird",
  awake: "Bildschirm beim Training anlassen",
  hidden: "Pause, solange diese Seite nicht zu sehen ist",
  unplugged: "Pause, solange das Gerät nicht lädt",
  metered: "Pause bei getakteten Verbindungen",
  leaveHeading: "Aussteigen",
  leaveAbout:
    "Alles, was diese Seite gespeichert hat, wird gelöscht: die Daten, der Schlüssel, das persönliche Modell " +
    "und die Seite selbst. Danach kann ein anderes Gerät Ihren Platz einnehmen.",
  leave: "Aussteigen und löschen",
  sureHeading: "Aussteigen und löschen?",
  sureAbout:
    "Ihre Daten, der Schlüssel und das persönliche Modell werden aus dieser Seite gelöscht. Ihre eigenen " +
    "Dateien bleiben. Sie können das nicht rückgängig machen.",
  stay: "Bleiben",
  hashes: "Prüfsummen dieser Seite",
  licences: "Lizenzen",
};

export const GERMAN: Words = {
  language: "de",
  page: PAGE,
  faults: GERMAN_FAULTS,
  insecure:
    "Diese Seite wurde ohne https geöffnet. Browser erlauben einer solchen Seite nicht, Schlüssel zu erzeugen oder " +
    "Daten zu speichern. Deshalb kann sie nicht mitmachen. Bitten Sie den Betreiber um einen Link, der mit https " +
    "beginnt.",
  missing: (features) =>
    `Dieser Browser kann nicht mitmachen. Ihm fehlt: ${features.join(", ")}. Verwenden Sie eine aktuelle Version ` +
    "von Chrome, Firefox oder Safari, und kein privates Fenster.",
  features: {
    modules: "Module in Workern",
    files: "ein privates Dateisystem (OPFS)",
    keys: "Schlüssel der Art Ed25519",
  },
  noToken:
    "Dieses Gerät macht noch nicht mit, und diese Adresse ist kein vollständiger Link. Öffnen Sie den vollständigen " +
    "Link, den Sie vom Betreiber haben, oder scannen Sie seinen QR-Code.",
  bareLink:
    "Dieser Link enthält keinen Fingerabdruck vom Schlüssel seines Koordinators. Deshalb vertraut diese Seite jedem " +
    "Server, der antwortet. Wenn Ihnen der Betreiber einen längeren Link geschickt hat, öffnen Sie diesen.",
  left: "Sie sind ausgestiegen. Alles, was diese Seite gespeichert hatte, ist gelöscht.",
  contact: (contact) => `Fragen: ${contact}`,
  estimate: (rounds, minutes, size) =>
    (rounds === 0
      ? "Es gibt keine letzte Runde. Jede Runde dauert"
      : rounds === 1
        ? "Eine Runde dauert"
        : `${rounds} Runden. Jede dauert`) +
    ` höchstens ${minutes} min.` +
    `${size === "" ? "" : ` ${rounds === 0 ? "In jeder" : "Insgesamt"} werden etwa ${size} empfangen und gesendet.`} ` +
    "Das Training braucht Akku: Lassen Sie dieses Gerät am Ladegerät.",
  leaves: {
    numbers: "die trainierten Zahlen vom Modellteil dieses Geräts",
    sums:
      "wenn der Koordinator nur Summen erfährt: maskierte Zahlen anstelle der trainierten Zahlen, der Anzahlen und " +
      "der Fehler. Außerdem Schlüssel und verschlüsselte Teile von Schlüsseln, mit denen nur die Summe lesbar ist",
    counts: "wie viele Beispiele Sie haben, und wie viele Schritte dieses Gerät trainiert hat",
    loss: "wie gut das Modell zu Ihren Beispielen passt: ein paar Zahlen für jede Runde",
    judged:
      "wenn die Geräte das Modell dieser Föderation beurteilen: bei wie vielen der zurückgelegten Beispiele das " +
      "Modell recht hat, und die Summe seiner Fehler",
    classes: "wenn die Modelle der Föderation danach fragen: welche Arten unter Ihren Beispielen vorkommen",
    inputs:
      "wenn der Koordinator Bereiche vergleicht: der Bereich, in dem die meisten Werte Ihrer Beispiele liegen, auf " +
      "zwei Stellen gerundet",
    name: "der Name, den Sie diesem Gerät geben",
    browser:
      "eine Beschreibung dieses Geräts: Browser, Prozessor, Modell und Zahl der Kerne, Arbeitsspeicher und freier " +
      "Speicher",
    speed: "wann dieses Gerät trainiert hat, wie schnell es rechnet und wie viel Arbeitsspeicher das Training braucht",
    doing:
      "was dieses Gerät gerade tut, und warum es pausiert: Sie haben es angehalten, die Seite ist nicht zu sehen, " +
      "das Gerät lädt nicht, oder die Verbindung ist getaktet",
    problems: "wenn das Training fehlschlägt: was nicht geklappt hat",
    release:
      "welche veröffentlichte Fassung des Modells dieses Gerät verwendet. Wenn es eine Fassung abgelehnt hat, auch " +
      "der Grund: zum Beispiel, bei wie vielen Ihrer Beispiele sie recht hat",
    key: "bei der Anmeldung dieses Geräts: ein öffentlicher Schlüssel und die Zeit seiner Uhr",
  },
  apart: (share) =>
    `${share} Ihrer Beispiele werden zurückgelegt: Dieses Gerät trainiert nie mit ihnen. In jeder Runde zählt es vor ` +
    "und nach seinem Training, bei wie vielen davon das Modell recht hat, und sendet diese Anzahlen.",
  onlySums: (fewest) =>
    `Der Koordinator erfährt nur die Summe der Ergebnisse von mindestens ${fewest} Geräten, nie das Ergebnis dieses ` +
    "Geräts.",
  leavesAddress: "wie bei jeder Webseite: die Internetadresse dieses Geräts",
  workerFailed: "Ein Teil dieser Seite konnte nicht geladen werden. Laden Sie die Seite neu.",
  tryingAgain: (seconds) => `Nächster Versuch in ${seconds} s.`,
  host: (host) => `Für die Föderation unter ${host}`,
  stages: {
    starting: "Wird geöffnet",
    held:
      "Warten: Diese Seite ist in einem anderen Tab offen, oder der letzte Schritt vor dem Neuladen ist noch nicht fertig",
    new: "Noch nicht dabei",
    joining: "Wird angemeldet",
    joined: "Bereit zum Training",
    waiting: "Warten auf die nächste Runde",
    downloading: "Das Modell wird geladen",
    training: "Training läuft",
    evaluating: "Es wird gezählt, bei wie vielen Ihrer Beispiele das neue Modell recht hat",
    uploading: "Das Ergebnis wird gesendet",
    paused: "Pause",
    leaving: "Sie steigen aus, und alles wird gelöscht",
    finished: "Alle Runden sind vorbei. Danke!",
  },
  measuring: (percent) =>
    `Es wird gemessen, wie schnell dieses Gerät ist (das dauert etwa eine halbe Minute): ${percent} % fertig`,
  afterTheEnd:
    "Sie können diese Seite schließen. Was sie gespeichert hat, bleibt, bis Sie unten " +
    `„${PAGE.leave}“ drücken.`,
  chooseData: "Angemeldet. Wählen Sie jetzt Ihre Daten aus.",
  pausing: "Pause nach diesem Schritt",
  paused: {
    owner: "Von Ihnen angehalten",
    hidden: "Pause, solange die Seite nicht zu sehen ist",
    unplugged: "Pause, bis das Gerät lädt",
    metered: "Pause, solange die Verbindung getaktet ist",
  },
  waitingFor: (joined, expected) =>
    `Warten auf andere Geräte: ${joined} von ${expected} sind angemeldet`,
  round: (round, rounds) => (rounds === 0 ? `Runde ${round}` : `Runde ${round} von ${rounds}`),
  epoch: (epoch, epochs) => `Durchgang ${epoch} von ${epochs}`,
  minutesLeft: (minutes) =>
    minutes < 1
      ? "Noch weniger als eine Minute in dieser Runde."
      : `Noch etwa ${minutes} min in dieser Runde.`,
  allLeft: (minutes) =>
    minutes < 1
      ? "Noch weniger als eine Minute Training in allen Runden."
      : `Noch etwa ${minutes} min Training in allen Runden.`,
  member: (name, part) => `Dieses Gerät ist „${name}“. Es trainiert ${part}.`,
  operatorNeeds: (id, submodel) => `Gerät ${id}, Teilmodell ${submodel}`,
  parts: {
    full: "das ganze Modell",
    "low-rank": "das Modell in komprimierter Form",
    cp: "das Modell in komprimierter Form und ein persönliches Modell, das hier bleibt",
    slice: "einen Teil des Modells",
    width: "eine schmalere Form des Modells",
    depth: "eine flachere Form des Modells",
  },
  otherPart: "seinen Teil des Modells",
  farOff: (channel, own, usual) =>
    `Prüfen Sie die Einheit Ihrer Daten: Ihre Werte von Kanal ${channel} liegen meistens zwischen ${own[0]} und ` +
    `${own[1]}, aber die Werte der ganzen Föderation liegen meistens zwischen ${usual[0]} und ${usual[1]}.`,
  noData: "Noch keine Daten in Verwendung.",
  data: (name, files, samples, size) =>
    `${files === 1 ? name : `${files} Dateien`}: ${samples === 1 ? "1 Beispiel" : `${samples} Beispiele`}, ${size}`,
  preparing: {
    pictures: (one, of) => `Bild ${one} von ${of} wird aufbereitet`,
    bytes: (percent) => `Die Daten werden gelesen: ${percent}`,
  },
  picturesOf: (name, count) => (count === 0 ? `Bilder: ${name}` : `Bilder: ${name} (${count} ausgewählt)`),
  usePictures: (count) => (count === 0 ? PAGE.usePictures : `${PAGE.usePictures} (${count})`),
  lookingAt: (one, of) => `Bild ${one} von ${of} wird angesehen`,
  takeOut: (name) => `${name} entfernen`,
  more: (count) => `und ${count} weitere`,
  unreadable: (names) => `Ausgelassen, weil dieser Browser sie nicht lesen kann: ${names.join(", ")}.`,
  twice: (names) => `Ausgelassen, weil sie schon ausgewählt sind: ${names.join(", ")}.`,
  csvHelp: (columns, label, classes) =>
    `Die erste Zeile nennt die Spalten. Jede weitere Zeile ist ein Zeitpunkt. Spalten: ${columns}. Die Spalte ` +
    `${label} sagt, was gemessen wurde${classes === "" ? "" : `: ${classes}`}.`,
  sent: (size) => `${size} gesendet, seit diese Seite offen ist`,
  sinceOpened: (minutes, down, up, battery) =>
    `Seit diese Seite offen ist: ${minutes} min Training, ${down} empfangen, ${up} gesendet` +
    `${battery === null ? "" : `, ${battery} % des Akkus verbraucht`}.`,
  persisted: "Der Browser hat zugesagt, zu behalten, was diese Seite speichert.",
  notPersisted: "Wenn der Browser Platz braucht, darf er löschen, was diese Seite gespeichert hat.",
  keepOpen:
    "Lassen Sie diese Seite offen: Das Training hält an, wenn Sie die Seite schließen, und geht weiter, wenn Sie " +
    "die Seite wieder öffnen.",
  passLoss: (loss) => `Fehler des Modells im letzten Durchgang: ${loss}`,
  oneLoss: (round, loss) => `Fehler des Modells in Runde ${round}: ${loss} (weniger ist besser)`,
  losses: (first, from, last, to) =>
    `Fehler des Modells: ${from} in Runde ${first}, ${to} in Runde ${last} (weniger ist besser)`,
  predictions: (round, before, beforeShare, after, afterShare) =>
    `Ihr erstes Beispiel in Runde ${round}: ${before} (${beforeShare}) vor Ihrem Training, ` +
    `${after} (${afterShare}) nach Ihrem Training`,
  tryFile: {
    images: "Nehmen Sie ein Bild auf, oder wählen Sie eines",
    series: "Wählen Sie eine Tabelle zum Ausprobieren (CSV)",
    arrays: "Wählen Sie eine Datei mit Beispielen (.npz)",
  },
  noModel: "Das Modell kommt mit der ersten Runde. Dann können Sie es hier ausprobieren.",
  tryLater:
    "Dieses Gerät trainiert gerade. Sie können das Modell ausprobieren, wenn das Training wartet, Pause hat oder " +
    "fertig ist.",
  model: (round) =>
    round === 1
      ? "Die Antwort kommt vom gemeinsamen Modell vor der ersten Runde. Vielleicht rät das Modell nur."
      : `Die Antwort kommt vom gemeinsamen Modell am Anfang von Runde ${round}.`,
  lastModel: "Die Antwort kommt vom gemeinsamen Modell nach der letzten Runde.",
  releasedModel: (number, round, date) =>
    `Die Antwort kommt von Fassung ${number} vom ${date}: dem gemeinsamen Modell nach Runde ${round}.`,
  right: (right, of, share) =>
    `Dieses Modell wurde an ${of} Ihrer eigenen Beispiele beurteilt und hatte bei ${right} recht (${share}).`,
  refusedRelease: (number) =>
    `Dieses Gerät hat Fassung ${number} abgelehnt: Sie ist bei Ihren Beispielen schlechter oder hier nicht verwendbar.`,
  personalModel: (round) =>
    `Die Antwort kommt von Ihrem persönlichen Modell, das dieses Gerät in Runde ${round} trainiert hat.`,
  trying: "Das Modell rechnet",
  tried: (file, lines) => `Die letzten ${lines} Zeilen von ${file}`,
  triedFirst: (file, of) => (of === 1 ? file : `Das erste von ${of} Beispielen in ${file}`),
  className: (index) => `Klasse ${index}`,
  mostProbable: (name, share) => `Am wahrscheinlichsten: ${name}, ${share}`,
  almostCertain: "über 99 %",
  almostImpossible: "unter 1 %",
  moreClasses: (count) => (count === 1 ? "und eine andere Klasse" : `und ${count} andere Klassen`),
  answer: (values) => `Antwort: ${values}`,
  emptySequence: "nichts",
  resume: "Weiter",
  remedies: [
    [
      "client.not-authorised",
      `Dieses Gerät ist nicht mehr Mitglied. Drücken Sie unten „${PAGE.leave}“, und öffnen Sie dann den Link noch ` +
      "einmal.",
    ],
    ["trust.", "Fragen Sie den Betreiber, bevor Sie weitermachen."],
    ["storage.lost", "Wählen Sie Ihre Daten noch einmal aus. Drücken Sie dann „Training starten“."],
    ["data.", "Wählen Sie Ihre Daten noch einmal aus."],
    ["client.", "Ihre Daten sind noch da. Drücken Sie „Training starten“, um es noch einmal zu versuchen."],
    [
      "",
      "Ihre Daten sind noch da. Um es noch einmal zu versuchen, drücken Sie „Training starten“. Wenn es wieder " +
        "nicht geht, sagen Sie es dem Betreiber.",
    ],
  ],
  refusals: {
    "client.not-authorised": "Der Koordinator kennt dieses Gerät nicht mehr.",
    "federation.finished": "Diese Föderation ist vorbei: Alle ihre Runden sind fertig.",
    "join.expired-token": "Dieser Link ist abgelaufen. Bitten Sie den Betreiber um einen neuen.",
    "join.operator-token": "Dieser Link ist nur für den Betreiber. Bitten Sie den Betreiber um den Link für Geräte.",
    "join.revoked-token": "Dieser Link gilt nicht mehr. Bitten Sie den Betreiber um einen neuen.",
    "join.skewed-clock":
      "Die Uhr dieses Geräts weicht zu sehr von der Uhr des Koordinators ab. Stellen Sie in den Einstellungen des " +
      "Geräts Datum, Uhrzeit und Zeitzone auf automatisch.",
    "join.unknown-memory":
      "Der Browser sagt nicht, wie viel Arbeitsspeicher dieses Gerät hat, und der Koordinator muss es wissen. " +
      "Versuchen Sie es mit Chrome, oder sagen Sie es dem Betreiber.",
    "join.unknown-token":
      "Der Koordinator kennt diesen Link nicht. Öffnen Sie den vollständigen Link, den Sie vom Betreiber haben, oder " +
      "bitten Sie um einen neuen.",
    "join.used-up-token": "Alle Plätze dieses Links sind vergeben. Bitten Sie den Betreiber um einen anderen Link.",
    "plan.nothing-fits": "Kein Teil des Modells ist klein genug für dieses Gerät. Sagen Sie es dem Betreiber.",
  },
};
