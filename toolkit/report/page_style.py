"""The style of a report's page, for light and dark screens."""

STYLE = """
:root {
  --ink: #1c2430; --muted: #5b6676; --grid: #dfe3e8; --paper: #ffffff; --ground: #f4f5f7;
  --budget: #c2272e; --predicted: #7a5bb0;
  --idle: #b9c2cc; --stages: #4fb8aa; --forward: #7fb0e8; --backprop: #f0a05a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8ebef; --muted: #9fa9b6; --grid: #333c47; --paper: #1b2129; --ground: #12161c;
    --budget: #ff7b7b; --predicted: #b79af0;
    --idle: #8e99a5;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
.under { color: var(--muted); margin: .25rem 0 1.25rem; }
.peak { background: var(--paper); border-left: .35rem solid var(--backprop);
  border-radius: .4rem; padding: .8rem 1.2rem; margin: 0 0 1rem; }
.peak strong { font-size: 1.5rem; }
.peak.over { border-color: var(--budget); }
.warning { color: var(--budget); font-weight: 600; margin: .25rem 0; }
.note { color: var(--muted); margin: .25rem 0; font-size: .92rem; }
section { background: var(--paper); border-radius: .5rem; padding: 1.2rem; margin-top: 1.2rem; }
section > p { color: var(--muted); margin: 0 0 .8rem; font-size: .92rem; max-width: 46rem; }
svg { display: block; width: 100%; height: auto; min-width: 36rem;
  margin-bottom: .8rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: 0 0 .6rem;
  padding: 0; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .45em;
  border-radius: .15em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding-bottom: .4rem; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--grid); }
th:first-child { text-align: left; white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 600; }
details { border-top: 1px solid var(--grid); padding: .5rem 0; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: 0;
  font-size: .92rem; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { background: none; } section, .peak { break-inside: avoid; padding: 0; } }
"""
