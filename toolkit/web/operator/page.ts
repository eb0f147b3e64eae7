/** Keeps the operator's page up to date: events of the coordinator, countdown and charts. */

import htmx from "htmx.org";
import { drawCharts } from "./charts";

const live = document.querySelector<HTMLElement>("[data-events]");

function countDown() {
  for (const shown of document.querySelectorAll<HTMLElement>(".countdown")) {
    const seconds = Math.max(0, Number(shown.dataset.seconds) - 1);
    shown.dataset.seconds = String(seconds);
    shown.textContent = duration(seconds);
  }
}

/** A time like that of format_duration on the server: 42 s, 2 min 3 s, 1 h 5 min. */
function duration(seconds: number): string {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

if (live?.dataset.events) {
  const events = new EventSource(live.dataset.events);
  // Every part of the page that shows something live loads itself again.
  const refresh = () => htmx.trigger(document.body, "changed");
  events.addEventListener("changed", refresh);
  // The login is over, or the coordinator ends. Loading the page shows which.
  events.addEventListener("error", () => events.readyState === EventSource.CLOSED && refresh());
  window.addEventListener("pagehide", () => events.close());
  setInterval(countDown, 1000);
}
document.addEventListener("htmx:after:swap", drawCharts);
drawCharts();
