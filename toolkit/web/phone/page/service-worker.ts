/** Opens the page without a network. It touches the page's own files only, never the protocol. */

/** The files of this build; the build fills it in. */
declare const CACHED: string[];

interface WorkerEvent extends Event {
  waitUntil: (work: Promise<unknown>) => void;
}
interface FetchEvent extends WorkerEvent {
  request: Request;
  respondWith: (answer: Promise<Response>) => void;
}

/** A new build has other files, and so another name. */
const CACHE = CACHED.join(" ");

addEventListener("install", (event) => {
  (event as WorkerEvent).waitUntil(caches.open(CACHE).then((cache) => cache.addAll(CACHED)));
});

addEventListener("activate", (event) => {
  const cleaned = caches
    .keys()
    .then((names) => Promise.all(names.filter((name) => name !== CACHE).map((name) => caches.delete(name))));
  (event as WorkerEvent).waitUntil(cleaned);
});

addEventListener("fetch", (event) => {
  const { request, respondWith } = event as FetchEvent;
  const scope = new URL("./", location.href).pathname;
  if (request.method !== "GET" || !new URL(request.url).pathname.startsWith(scope)) return;
  // Network first for the page itself, so that a new build is seen; hashed files never change.
  const cached = (): Promise<Response | undefined> => caches.match(request, { ignoreSearch: true });
  const answer =
    request.mode === "navigate"
      ? fetch(request).catch(async () => (await caches.match("./")) ?? Response.error())
      : cached().then((found) => found ?? fetch(request));
  respondWith.call(event, answer);
});
