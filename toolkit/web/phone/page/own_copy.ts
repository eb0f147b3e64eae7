/** The page's copy of itself. With it, a member can open the page without a network. */

/** The names of caches begin with this, as in service-worker.ts. */
const CACHES = "edgetailor-page-";

let kept: Promise<ServiceWorkerRegistration | undefined> = Promise.resolve(undefined);

/** Stores a copy. Without it, the page works, but does not open offline. */
export function keepCopy(): void {
  kept = navigator.serviceWorker?.register("./service-worker.js").catch(() => undefined);
}

export async function removeCopy(): Promise<void> {
  const copy = (await kept) ?? (await navigator.serviceWorker?.getRegistration("./"));
  // A copy that is being installed may write to the caches after this: remove them again.
  copy?.installing?.addEventListener("statechange", () => void removeCaches());
  await copy?.unregister();
  await removeCaches();
}

async function removeCaches(): Promise<void> {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(CACHES)).map((name) => caches.delete(name)));
}
