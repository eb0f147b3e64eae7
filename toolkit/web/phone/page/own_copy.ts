/** The page's copy of itself, by which a member opens it without a network. */

/** As in service-worker.ts. */
const CACHES = "edgetailor-page-";

let kept: Promise<ServiceWorkerRegistration | undefined> = Promise.resolve(undefined);

/** Without a copy the page works, but does not open offline. */
export function keepCopy(): void {
  kept = navigator.serviceWorker?.register("./service-worker.js").catch(() => undefined);
}

export async function removeCopy(): Promise<void> {
  const copy = (await kept) ?? (await navigator.serviceWorker?.getRegistration("./"));
  // One that is being made is stored for a moment.
  copy?.installing?.addEventListener("statechange", () => void removeCaches());
  await copy?.unregister();
  await removeCaches();
}

async function removeCaches(): Promise<void> {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(CACHES)).map((name) => caches.delete(name)));
}
