/** Opens the page without a network. It answers only for the page's files, never for the protocol. */

/** The files of this build, and the name of the build; the build fills them in. */
declare const CACHED: string[];
declare const BUILD: string;

interface ExtendableEvent extends Event {
  waitUntil: (work: Promise<unknown>) => void;
}
interface FetchEvent extends Event {
  request: Request;
  respondWith: (answer: Promise<Response>) => void;
}

const CACHE = `edgetailor-page-${BUILD}`;

async function install(): Promise<void> {
  await (await caches.open(CACHE)).addAll(CACHED);
}

/** Removes older copies. Runs when no page of an older build is open any more. */
async function removeOlder(): Promise<void> {
  const names = await caches.keys();
  const older = names.filter((name) => name.startsWith("edgetailor-page-") && name !== CACHE);
  await Promise.all(older.map((name) => caches.delete(name)));
}

/** Answers for the page from the network first, to see a new build. Files with hashes never change. */
async function answer(request: Request): Promise<Response> {
  const stored = await caches.match(request);
  if (stored !== undefined && request.mode !== "navigate") return stored;
  try {
    const answered = await fetch(request);
    // If a proxy answers that the coordinator is away, the stored page opens and waits.
    return answered.ok ? answered : (stored ?? answered);
  } catch (error) {
    if (stored === undefined) throw error;
    return stored;
  }
}

addEventListener("install", (event) => (event as ExtendableEvent).waitUntil(install()));
addEventListener("activate", (event) => (event as ExtendableEvent).waitUntil(removeOlder()));
addEventListener("fetch", (event) => {
  const { request } = event as FetchEvent;
  const ours = request.url.startsWith(new URL("./", location.href).href);
  if (request.method === "GET" && ours) (event as FetchEvent).respondWith(answer(request));
});
