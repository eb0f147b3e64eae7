/** The elements of the page by their ids. */

export function element<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** Shows `text` in the element `id`, which keeps its place. */
export function write(id: string, text: string): void {
  const place = element(id);
  // Screen readers repeat a text that is set again.
  if (place.textContent !== text) place.textContent = text;
}

/** Shows `text` in the element `id`, which is hidden while it has none. */
export function say(id: string, text: string): void {
  write(id, text);
  element(id).hidden = text === "";
}
