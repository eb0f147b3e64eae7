/** Finds and fills elements of the page by their ids. */

export function element<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** Shows `text` in the element `id`. The element stays visible if the text is empty. */
export function write(id: string, text: string): void {
  const shown = element(id);
  // If a text is set again, screen readers repeat it.
  if (shown.textContent !== text) shown.textContent = text;
}

/** Shows `text` in the element `id`. The element is hidden if the text is empty. */
export function say(id: string, text: string): void {
  write(id, text);
  element(id).hidden = text === "";
}

/** Makes an item of a list with `content`. */
export function itemWith(content: string | Node): HTMLElement {
  const item = document.createElement("li");
  item.append(content);
  return item;
}
