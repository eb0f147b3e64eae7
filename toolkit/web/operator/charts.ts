/** Draws the charts: elements whose `data-chart` has lines over rounds. */

import uPlot from "uplot";

/** `lines` may have gaps (null). The point at round `best` is marked. */
interface Chart {
  rounds: number[];
  lines: { label: string; values: (number | null)[] }[];
  best: number | null;
}

const HEIGHT = 240;
const drawn = new WeakMap<Element, { plot: uPlot; data: string }>();

const colour = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name);

/** The text of a value in the legend: nothing while no round is pointed at, and in a gap. */
const value = (_: uPlot, given: number | null | undefined) => (given == null ? "" : Number(given.toPrecision(5)).toString());

function table({ rounds, lines, best }: Chart): uPlot.AlignedData {
  const marked = rounds.map((round, at) => (round === best ? (lines[0]?.values[at] ?? null) : null));
  return [rounds, ...lines.map(({ values }) => values), ...(best === null ? [] : [marked])];
}

function options(chart: Chart, width: number): uPlot.Options {
  const colours = [colour("--accent"), colour("--second"), colour("--quiet")];
  const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 0.3 }, ticks: { show: false } };
  const lines: uPlot.Series[] = chart.lines.map(({ label }, number) => ({
    label,
    stroke: colours[number] ?? colour("--text"),
    width: 2,
    spanGaps: true,
    value,
    ...(number ? { dash: [6, 4] } : {}),
  }));
  const good = colour("--good");
  const points = { show: true, size: 12, fill: good, stroke: good };
  const best: uPlot.Series[] = chart.best === null ? [] : [{ label: "best", paths: () => null, points, stroke: good, value }];
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false } },
    series: [{ label: "round", value: (_, round: number | null) => (round === null ? "" : `${round}`) }, ...lines, ...best],
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }, { ...axis, size: 60 }],
    cursor: { drag: { x: false, y: false } },
  };
}

/** Draws every chart whose data, width or colours have changed. */
export function drawCharts() {
  for (const element of document.querySelectorAll<HTMLElement>("[data-chart]")) {
    const text = element.dataset.chart ?? "";
    const data = `${text} ${element.clientWidth} ${colour("--text")}`;
    const before = drawn.get(element);
    if (before?.data === data) continue;
    before?.plot.destroy();
    const chart = JSON.parse(text) as Chart;
    drawn.set(element, { plot: new uPlot(options(chart, element.clientWidth), table(chart), element), data });
  }
}

window.addEventListener("resize", drawCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
