/**
 * Everything that leaves this device: each field of each request, with the line of the page's list
 * that describes it. The page draws its list from this table. The types of the requests come from it,
 * too, so no field is sent without a line.
 */

/** A line of the list. */
export type Line =
  | "numbers"
  | "sums"
  | "counts"
  | "loss"
  | "judged"
  | "classes"
  | "inputs"
  | "name"
  | "browser"
  | "speed"
  | "doing"
  | "problems"
  | "release"
  | "key";
/** Values that the coordinator has sent or that are the same for all devices. They have no line. */
type Nothing = "";

const table = <T extends Record<string, Record<string, Line | Nothing>>>(given: T): T => given;

/** The line of each field, by request; for a field with fields of its own, by request and field. */
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
  "POST /secret": { challenge: "", secret_sha256: "key", signature: "key" },
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
    evaluation: "judged",
  },
  "POST /rounds/{round}/sum/keys": { bundle: "", mask_key: "sums", share_key: "sums", signature: "sums" },
  "POST /rounds/{round}/sum/shares": { shares: "sums" },
  "POST /rounds/{round}/sum/input": { sha256: "sums" },
  "POST /rounds/{round}/sum/confirmation": { signature: "sums" },
  "POST /rounds/{round}/sum/unmasking": { seeds: "sums", keys: "sums" },
  "POST /rounds/{round}/evaluation": { bundle: "", counts: "judged" },
  "POST /releases/{number}": {
    number: "",
    bundle: "",
    taken: "release",
    runs: "release",
    code: "release",
    reason: "release",
    before: "judged",
    after: "judged",
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

/** The body of a request. It has exactly the fields of the table. */
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
