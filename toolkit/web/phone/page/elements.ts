/** The elements of the page by their ids. */

export function element<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** Shows `text` in the element `id`, which keeps its place. */
export function write(id: string, text: string): void {
  const shown = element(id);
  // Screen readers repeat a text that is set again.
  if (shown.textContent !== text) shown.textContent = text;
}

/** Shows `text` in the element `id`, which is hidden while it has none. */
export function say(id: string, text: string): void {
  write(id, text);
  element(id).hidden = text === "";
}

/** An item of a list. */
export function itemWith(content: string | Node): HTMLElement {
  const item = document.createElement("li");
  item.append(content);
  return item;
}
