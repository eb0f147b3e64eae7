/**
 * What leaves this device: every field of every request, with the line of the page's list that tells
 * of it. The page draws its list from this table. The types of what is sent come from it, too, so
 * that no field is sent without a line.
 */

/** A line of the list. */
export type Line =
  | "numbers"
  | "counts"
  | "loss"
  | "classes"
  | "inputs"
  | "name"
  | "browser"
  | "speed"
  | "doing"
  | "problems"
  | "key";
/** What the coordinator itself has sent, or the same for all devices. It has no line. */
type Nothing = "";

const table = <T extends Record<string, Record<string, Line | Nothing>>>(given: T): T => given;

/** By request, or by field for what is in a field. */
export const DISCLOSED = table({
  "POST /devices": {
    name: "name",
    public_key: "key",
    machine: "browser",
    timestamp: "key",
    signature: "key",
    profile: "speed",
  },
  "POST /devices profile": {
    version: "",
    name: "name",
    cores: "browser",
    memory_bytes: "browser",
    storage_free_bytes: "browser",
    machine: "browser",
    date: "speed",
    calibration: "speed",
    sources: "speed",
  },
  "POST /progress": { state: "doing", loss: "loss", note: "doing" },
  "POST /problems": { submodel: "", failures: "problems", reason: "problems", round: "", code: "problems" },
  "POST /stopped": { code: "problems", reason: "problems", round: "" },
  "PUT /rounds/{round}/tensors/{sha256}": { tensors: "numbers" },
  "POST /rounds/{round}/update": {
    version: "",
    bundle: "",
    base: "",
    submodel: "",
    samples: "counts",
    steps: "counts",
    loss_first: "loss",
    loss_last: "loss",
    tensors: "",
    file: "numbers",
    profile: "speed",
    validation: "",
    classes: "classes",
    inputs: "inputs",
  },
  "POST /rounds/{round}/update profile": {
    version: "",
    submodel: "",
    structure: "",
    machine: "browser",
    versions: "",
    method: "speed",
    measured_at: "speed",
    batch_size: "",
    phases: "speed",
    before: "",
    after: "",
    validity: "speed",
  },
});

/** The body of a request: it has exactly the fields of the table. */
export type Body<R extends keyof typeof DISCLOSED> = { [F in keyof (typeof DISCLOSED)[R]]: unknown };

/** The fields of each line, like "POST /progress note", in the order of the lines. */
export function fieldsByLine(): Map<Line | Nothing, string[]> {
  const byLine = new Map<Line | Nothing, string[]>();
  for (const [request, fields] of Object.entries(DISCLOSED)) {
    for (const [field, line] of Object.entries(fields)) {
      byLine.set(line, [...(byLine.get(line) ?? []), `${request} ${field}`]);
    }
  }
  return byLine;
}
