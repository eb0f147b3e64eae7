/** Checks whether this browser has the features that the page and its worker need. */

import { TEXTS } from "./words.js";

/** The names of missing features. Private windows of some browsers have no storage. */
export async function missingFeatures(): Promise<string[]> {
  const features: [string, () => unknown][] = [
    ["WebAssembly", () => typeof WebAssembly === "object"],
    [TEXTS.features.modules, hasModuleWorkers],
    ["Web Locks", () => navigator.locks],
    ["IndexedDB", () => indexedDB],
    [TEXTS.features.files, () => navigator.storage.getDirectory()],
    [TEXTS.features.keys, () => crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])],
  ];
  const missing = [];
  for (const [name, use] of features) {
    try {
      if (!(await use())) missing.push(name);
    } catch {
      missing.push(name);
    }
  }
  return missing;
}

/** A browser that knows module workers reads the option `type` before it refuses the invalid address. */
function hasModuleWorkers(): boolean {
  let asked = false;
  const options = {
    get type(): WorkerType {
      asked = true;
      return "module";
    },
  };
  try {
    new Worker("https://:", options).terminate();
  } catch {
    // No worker starts.
  }
  return asked;
}
