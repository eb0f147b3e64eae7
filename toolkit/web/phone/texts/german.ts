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
  leavesNumbers: "die trainierten Zahlen seines Teils des Modells",
  leavesCounts: "die Anzahl Ihrer Beispiele, der Fehler und die Zeit des Trainings",
  leavesMachine: "der Name, den Sie dem Gerät geben, und eine Beschreibung seines Browsers und Tempos",
  staysHeading: "Was es nie verlässt",
  staysData: "Ihre Daten",
  staysPersonal: "Ihr persönliches Modell, falls diese Föderation persönliche Modelle hat",
  staysKey: "der Schlüssel, an dem der Koordinator dieses Gerät erkennt",
  dataHeading: "Ihre Daten",
  picturesAbout: "Wählen Sie Bilder jeder Art aus, oder nehmen Sie welche auf. Sie bleiben auf diesem Gerät.",
  usePictures: "Diese Bilder verwenden",
  csvLabel: "Messungen (CSV)",
  otherData: "Arrays von numpy",
  fileLabel: "Datei mit Daten",
  fileHelp:
    "Eine Datei von numpy (.npz) mit den Arrays x (Beispiele) und y (Labels). Eine Kopie bleibt auf diesem Gerät.",
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
    "Dieses Gerät macht noch nicht mit, und diese Adresse enthält keinen Schlüssel zum Mitmachen. Öffnen Sie " +
    "den ganzen Link, den Sie vom Betreiber haben, oder scannen Sie seinen Code.",
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
    uploading: "Das Ergebnis wird gesendet",
    paused: "Pause",
    leaving: "Es wird ausgestiegen und gelöscht",
    finished: "Alle Runden sind vorbei. Danke! Sie können diese Seite schließen.",
  },
  measuring: (percent) =>
    `Es wird gemessen, wie schnell dieses Gerät ist, etwa eine halbe Minute: ${percent} % fertig`,
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
  round: (round) => `Runde ${round}`,
  epoch: (epoch, epochs) => `Durchgang ${epoch} von ${epochs} durch Ihre Daten`,
  minutesLeft: (minutes) =>
    minutes < 1
      ? "Weniger als eine Minute in dieser Runde"
      : `Noch etwa ${minutes} min in dieser Runde`,
  member: (name, id, submodel) =>
    `Dieses Gerät ist „${name}“ (${id}). Sein Teil des Modells: ${submodel}.`,
  noData: "Noch keine Daten ausgewählt.",
  data: (name, files, samples, size) =>
    `${files === 1 ? name : `${files} Dateien`}: ${samples} Beispiele, ${size}`,
  preparing: (one, of) => `Bild ${one} von ${of} wird aufbereitet`,
  picturesOf: (name, count) => (count === 0 ? `Bilder: ${name}` : `Bilder: ${name} (${count} ausgewählt)`),
  usePictures: (count) => (count === 0 ? PAGE.usePictures : `${PAGE.usePictures} (${count})`),
  csvHelp: (columns, label, classes) =>
    `Eine Zeile mit Namen, dann eine Zeile für jeden Zeitpunkt. Spalten: ${columns}. Die Spalte ${label} ` +
    `sagt, was es war${classes === "" ? "" : `: ${classes}`}.`,
  sent: (size) => `${size} gesendet, seit diese Seite offen ist`,
  traffic: (down, up) => `${down} empfangen, ${up} gesendet`,
  trained: (minutes) => `${minutes} min Training`,
  battery: (percent) => `${percent} % des Akkus verbraucht, seit diese Seite offen ist`,
  persisted: "Der Browser hat zugesagt, zu behalten, was diese Seite speichert.",
  notPersisted: "Der Browser darf löschen, was diese Seite speichert, wenn er Platz braucht.",
  keepOpen:
    "Lassen Sie diese Seite offen: Das Training hält an, wenn sie geschlossen wird, und geht weiter, wenn sie " +
    "wieder geöffnet wird.",
  passLoss: (loss) => `Fehler im letzten Durchgang: ${loss}`,
  oneLoss: (round, loss) => `Fehler in Runde ${round}: ${loss}`,
  losses: (first, from, last, to) => `Fehler: ${from} in Runde ${first}, ${to} in Runde ${last}`,
  predictions: (round, before, beforeShare, after, afterShare) =>
    `Ihr erstes Beispiel in Runde ${round}: ${before} (${beforeShare}) vor Ihrem Training, ` +
    `${after} (${afterShare}) danach`,
  resume: "Weiter",
  remedies: [
    [
      "client.not-authorised",
      "Dieses Gerät hat seinen Platz verloren. Löschen Sie unten, und öffnen Sie dann den Link noch einmal.",
    ],
    ["trust.", "Machen Sie erst weiter, wenn Sie den Betreiber gefragt haben."],
    ["data.", "Wählen Sie eine andere Datei aus."],
    [
      "",
      "Nichts ist verloren. Um es noch einmal zu versuchen, drücken Sie „Training starten“. Wenn es wieder " +
        "nicht geht, sagen Sie es dem Betreiber.",
    ],
  ],
};
