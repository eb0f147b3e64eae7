/** Every word that a person reads on the page, in German. */

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
    "schickt nur, was es gelernt hat.",
  nameLabel: "Name dieses Geräts",
  nameDefault: "mein Handy",
  nameHelp: "Der Betreiber sieht diesen Namen.",
  join: "Mitmachen",
  sharesHeading: "Was dieses Gerät verlässt",
  byClass: "Diese Zahlen auch für jede Art von Beispielen senden",
  staysHeading: "Was es nie verlässt",
  staysData: "Ihre Daten",
  staysPersonal: "Ihr persönliches Modell, falls diese Föderation persönliche Modelle hat",
  staysKey: "die geheime Hälfte seines Schlüssels, an dem der Koordinator es erkennt",
  tryHeading: "Ausprobieren",
  tryClasses: "Wahrscheinlichkeit jeder Klasse",
  tryStays: "Es bleibt auf diesem Gerät, und diese Seite behält es nicht.",
  dataHeading: "Ihre Daten",
  picturesAbout: "Wählen Sie Bilder jeder Art aus, oder nehmen Sie welche auf. Sie bleiben auf diesem Gerät.",
  usePictures: "Diese Bilder verwenden",
  csvLabel: "Messungen (CSV)",
  otherData: "Eine Datei mit fertigen Beispielen",
  fileLabel: "Datei mit Daten",
  fileHelp:
    "Eine Datei, deren Name auf .npz endet, von einem Programm gemacht: die Arrays x (Beispiele) und y (Labels) von " +
    "numpy. Eine Kopie bleibt auf diesem Gerät.",
  adding: "Die vorhandenen Beispiele behalten und neue hinzufügen",
  changeData: "Daten ändern oder hinzufügen",
  changeAbout: "Neue Daten zählen ab der nächsten Runde.",
  operatorHeading: "Für Fragen an den Betreiber",
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
    "Diese Seite wurde ohne https geöffnet. Browser geben einer solchen Seite weder Schlüssel noch " +
    "Speicher, deshalb kann sie nicht mitmachen. Bitten Sie den Betreiber um einen Link, der mit https beginnt.",
  missing: (features) =>
    `Dieser Browser kann nicht mitmachen: Ihm fehlt ${features.join(", ")}. Verwenden Sie eine aktuelle Version ` +
    "von Chrome, Firefox oder Safari, und kein privates Fenster.",
  features: {
    modules: "Module in Workern",
    files: "ein privates Dateisystem (OPFS)",
    keys: "Schlüssel der Art Ed25519",
  },
  noToken:
    "Dieses Gerät macht noch nicht mit, und diese Adresse ist kein ganzer Link. Öffnen Sie den ganzen Link, den " +
    "Sie vom Betreiber haben, oder scannen Sie seinen Code.",
  bareLink:
    "Dieser Link sagt nicht, welchen Schlüssel sein Koordinator hat; deshalb glaubt diese Seite jedem, der antwortet. " +
    "Wenn Sie vom Betreiber einen längeren Link haben, öffnen Sie den.",
  left: "Sie sind ausgestiegen. Alles, was diese Seite gespeichert hatte, ist gelöscht.",
  contact: (contact) => `Fragen: ${contact}`,
  estimate: (rounds, minutes, size) =>
    `${rounds === 0 ? "Runden ohne Ende" : rounds === 1 ? "Eine Runde" : `${rounds} Runden`} ` +
    `von höchstens ${minutes} min.` +
    `${size === "" ? "" : ` ${rounds === 0 ? "In jeder" : "Insgesamt"} werden etwa ${size} empfangen und gesendet.`} Das Training braucht Akku: Am ` +
    "besten hängt das Gerät am Ladegerät.",
  leaves: {
    numbers: "die trainierten Zahlen seines Teils des Modells",
    sums:
      "wenn der Koordinator nur Summen erfährt: maskierte Zahlen anstelle der trainierten Zahlen, der Anzahlen und der " +
      "Fehler, und Schlüssel und verschlüsselte Teile von Schlüsseln, mit denen nur die Summe lesbar wird",
    counts: "wie viele Beispiele Sie haben, und wie viele Schritte es trainiert hat",
    loss: "wie gut das Modell zu Ihren Beispielen passt: ein paar Zahlen für jede Runde",
    judged:
      "bei wie vielen der zurückgelegten Beispiele das Modell recht hat, und die Summe seiner Fehler dabei, wenn die " +
      "Geräte dieser Föderation das Modell beurteilen",
    classes: "welche der Arten unter Ihren Beispielen vorkommen, wenn die Modelle der Föderation danach fragen",
    inputs:
      "in welchem Bereich die Werte Ihrer Beispiele meistens liegen, auf zwei Stellen, wenn der Koordinator sie vergleicht",
    name: "der Name, den Sie diesem Gerät geben",
    browser:
      "eine Beschreibung dieses Geräts: Browser, Prozessor, Modell und Zahl der Kerne, Arbeitsspeicher und freier Speicher",
    speed: "wann es trainiert hat, wie schnell es rechnet und wie viel Arbeitsspeicher das braucht",
    doing: "was es gerade tut, und warum es pausiert: Sie, die verdeckte Seite, kein Ladegerät, eine getaktete Verbindung",
    problems: "was nicht geklappt hat, wenn sein Training fehlschlägt",
    release:
      "welche veröffentlichte Fassung des Modells es verwendet, oder warum es eine nicht genommen hat, zum Beispiel bei " +
      "wie vielen Ihrer Beispiele sie recht hat",
    key: "ein öffentlicher Schlüssel und die Zeit seiner Uhr, wenn es mitmacht",
  },
  apart: (share) =>
    `${share} Ihrer Beispiele werden zurückgelegt: Dieses Gerät trainiert nie mit ihnen. In jeder Runde zählt es, bei ` +
    "wie vielen davon das Modell recht hat, vor und nach seinem Training, und sendet diese Zahlen.",
  onlySums: (fewest) =>
    `Der Koordinator erfährt nur die Summe der Ergebnisse von mindestens ${fewest} Geräten, nie das Ergebnis dieses Geräts.`,
  leavesAddress: "wie bei jeder Seite: seine Internetadresse",
  workerFailed: "Ein Teil dieser Seite konnte nicht geladen werden. Laden Sie die Seite neu.",
  tryingAgain: (seconds) => `Nächster Versuch in ${seconds} s.`,
  host: (host) => `Für die Föderation unter ${host}`,
  stages: {
    starting: "Wird geöffnet",
    held: "Warten, bis diese Seite in einem anderen Tab endet oder der letzte Schritt vor dem Neuladen vorbei ist",
    new: "Noch nicht dabei",
    joining: "Wird angemeldet",
    joined: "Bereit zum Training",
    waiting: "Warten auf die nächste Runde",
    downloading: "Das Modell wird geladen",
    training: "Training läuft",
    evaluating: "Es wird gezählt, bei wie vielen Ihrer Beispiele das neue Modell recht hat",
    uploading: "Das Ergebnis wird gesendet",
    paused: "Pause",
    leaving: "Es wird ausgestiegen und gelöscht",
    finished: "Alle Runden sind vorbei. Danke!",
  },
  measuring: (percent) => `Das Tempo wird gemessen, etwa eine halbe Minute: ${percent} % fertig`,
  afterTheEnd:
    "Sie können diese Seite schließen. Was sie gespeichert hat, bleibt, bis Sie unten " +
    `„${PAGE.leave}“ drücken.`,
  chooseData: "Angemeldet. Wählen Sie jetzt Ihre Daten aus.",
  pausing: "Pause nach diesem Schritt",
  paused: {
    owner: "Pause durch Sie",
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
    cp: "das Modell in komprimierter Form und daneben ein persönliches, das hier bleibt",
    slice: "einen Teil des Modells",
    width: "eine schmalere Form des Modells",
    depth: "eine flachere Form des Modells",
  },
  otherPart: "seinen Teil des Modells",
  farOff: (channel, own, usual) =>
    `Prüfen Sie die Einheit Ihrer Daten: Die Werte von Kanal ${channel} liegen meistens zwischen ${own[0]} und ` +
    `${own[1]}, die der Föderation zwischen ${usual[0]} und ${usual[1]}.`,
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
  takeOut: (name) => `${name} herausnehmen`,
  more: (count) => `und ${count} weitere`,
  unreadable: (names) => `Ausgelassen, weil dieser Browser sie nicht lesen kann: ${names.join(", ")}.`,
  twice: (names) => `Schon ausgewählt, deshalb ausgelassen: ${names.join(", ")}.`,
  csvHelp: (columns, label, classes) =>
    `Eine Zeile mit Namen, dann eine Zeile für jeden Zeitpunkt. Spalten: ${columns}. Die Spalte ${label} ` +
    `sagt, was es war${classes === "" ? "" : `: ${classes}`}.`,
  sent: (size) => `${size} gesendet, seit diese Seite offen ist`,
  sinceOpened: (minutes, down, up, battery) =>
    `Seit diese Seite offen ist: ${minutes} min Training, ${down} empfangen, ${up} gesendet` +
    `${battery === null ? "" : `, ${battery} % des Akkus verbraucht`}.`,
  persisted: "Der Browser hat zugesagt, zu behalten, was diese Seite speichert.",
  notPersisted: "Der Browser darf löschen, was diese Seite speichert, wenn er Platz braucht.",
  keepOpen:
    "Lassen Sie diese Seite offen: Das Training hält an, wenn sie geschlossen wird, und geht weiter, wenn sie " +
    "wieder geöffnet wird.",
  passLoss: (loss) => `Fehler des Modells im letzten Durchgang: ${loss}`,
  oneLoss: (round, loss) => `Fehler des Modells in Runde ${round}: ${loss} (weniger ist besser)`,
  losses: (first, from, last, to) =>
    `Fehler des Modells: ${from} in Runde ${first}, ${to} in Runde ${last} (weniger ist besser)`,
  predictions: (round, before, beforeShare, after, afterShare) =>
    `Ihr erstes Beispiel in Runde ${round}: ${before} (${beforeShare}) vor Ihrem Training, ` +
    `${after} (${afterShare}) danach`,
  tryFile: {
    images: "Nehmen Sie ein Bild auf, oder wählen Sie eines",
    series: "Wählen Sie eine Tabelle zum Ausprobieren (CSV)",
    arrays: "Wählen Sie eine Datei mit Beispielen (.npz)",
  },
  noModel: "Das Modell kommt mit der ersten Runde. Dann können Sie es hier ausprobieren.",
  tryLater:
    "Dieses Gerät trainiert gerade. Sie können das Modell ausprobieren, wenn es wartet, Pause hat oder fertig ist.",
  model: (round) =>
    round === 1
      ? "Das gemeinsame Modell antwortet, so wie es vor der ersten Runde war. Vielleicht rät es nur."
      : `Das gemeinsame Modell antwortet, so wie es am Anfang von Runde ${round} war.`,
  lastModel: "Das gemeinsame Modell antwortet, so wie es nach der letzten Runde war.",
  releasedModel: (number, round, date) =>
    `Das veröffentlichte Modell antwortet: Fassung ${number} vom ${date}, das gemeinsame Modell nach Runde ${round}.`,
  right: (right, of, share) =>
    `Bei ${right} von ${of} Ihrer eigenen Beispiele, an denen es beurteilt wurde, hatte es recht (${share}).`,
  refusedRelease: (number) =>
    `Dieses Gerät hat Fassung ${number} nicht genommen: Sie ist bei Ihren Beispielen schlechter, oder sie geht hier nicht.`,
  personalModel: (round) =>
    `Ihr persönliches Modell antwortet, so wie dieses Gerät es in Runde ${round} trainiert hat.`,
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
      "Dieses Gerät hat seinen Platz verloren. Löschen Sie unten, und öffnen Sie dann den Link noch einmal.",
    ],
    ["trust.", "Machen Sie erst weiter, wenn Sie den Betreiber gefragt haben."],
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
    "join.operator-token": "Dieser Link ist der des Betreibers. Bitten Sie ihn um den Link für Geräte.",
    "join.revoked-token": "Dieser Link gilt nicht mehr. Bitten Sie den Betreiber um einen neuen.",
    "join.skewed-clock":
      "Die Uhr dieses Geräts weicht zu sehr von der des Koordinators ab. Stellen Sie Datum, Uhrzeit und Zeitzone in " +
      "den Einstellungen des Geräts auf automatisch.",
    "join.unknown-memory":
      "Der Browser sagt nicht, wie viel Arbeitsspeicher dieses Gerät hat, und der Koordinator braucht das. " +
      "Versuchen Sie es mit Chrome, oder sagen Sie es dem Betreiber.",
    "join.unknown-token":
      "Der Koordinator kennt diesen Link nicht. Öffnen Sie den ganzen Link, den Sie vom Betreiber haben, oder bitten " +
      "Sie um einen neuen.",
    "join.used-up-token": "Alle Plätze dieses Links sind vergeben. Bitten Sie den Betreiber um einen anderen Link.",
    "plan.nothing-fits": "Kein Teil des Modells ist klein genug für dieses Gerät. Sagen Sie es dem Betreiber.",
  },
};
