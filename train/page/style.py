"""The page's style sheet: system fonts, two colour schemes, nothing loaded from anywhere."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #f7f7f5; --card: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #dcdfe3;
  --accent: #1f5f8b; --second: #b4541a; --shallow: #8fb8cf; --deep: #173f5f; --unused: #f3e2c9;
  --mark: 226 152 24;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1c2024; --ink: #e3e6e8; --soft: #a2abb4; --line: #343a41;
    --accent: #6db3de; --second: #e39a63; --shallow: #35617d; --deep: #b5dcf2; --unused: #453324;
    --mark: 196 118 20;
  }
  svg image, .ramp i { filter: invert(1) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .1rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .3rem; }
h3 { font-size: .98rem; margin: 0 0 .3rem; font-weight: 600; }
p { margin: .3rem 0 .8rem; max-width: 46rem; }
.kicker { color: var(--accent); font-size: .78rem; font-weight: 600; letter-spacing: .08em;
  text-transform: uppercase; margin: 0; }
.soft, .note { color: var(--soft); }
.note { font-size: .88rem; }
nav { margin: 1rem 0 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .92rem; }
a { color: var(--accent); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .7rem;
  margin: 1.3rem 0 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem .8rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--soft); font-size: .78rem; font-weight: 400; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  gap: .9rem; margin-top: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .8rem .9rem .6rem; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg line.grid { stroke: var(--line); stroke-width: 1; }
svg .tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg .hit { fill: transparent; }
svg .hit:hover { fill: var(--ink); fill-opacity: .1; }
svg .unused, .unused-key { fill: var(--unused); background: var(--unused); }
svg image { image-rendering: pixelated; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; list-style: none; padding: 0;
  margin: .1rem 0 .2rem; font-size: .82rem; color: var(--soft); }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: .4em; vertical-align: middle; }
.ramp { display: flex; flex-wrap: wrap; align-items: center; gap: .45rem; font-size: .82rem;
  color: var(--soft); margin-bottom: .2rem; }
.ramp i { width: 120px; height: 10px; border-radius: 2px; }
.key { width: 12px; height: 12px; border-radius: 2px; border: 1px solid var(--line); }
details.layer { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin-top: .8rem; }
details.layer > summary { cursor: pointer; padding: .65rem .9rem; display: flex; flex-wrap: wrap;
  gap: .1rem 1.1rem; align-items: baseline; }
details.layer > summary b { font-weight: 600; min-width: 5.2em; }
details.layer > summary b::before { content: "\\25B8"; display: inline-block; width: 1.1em;
  color: var(--soft); }
details.layer[open] > summary b::before { content: "\\25BE"; }
summary span { color: var(--soft); font-size: .86rem; font-variant-numeric: tabular-nums; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.inside { padding: 0 .9rem .9rem; }
.inside figure { border: 0; padding: .2rem 0 .4rem; }
#every-token:checked ~ details .words-only, #every-token:not(:checked) ~ details .all-only {
  display: none; }
#every-token { accent-color: var(--accent); margin: 0 .5em 0 0; vertical-align: -.1em; }
#every-token + label { cursor: pointer; font-size: .88rem; }
.experts { display: grid; gap: 1.1rem; margin-top: .5rem; }
.expert { border-top: 1px solid var(--line); padding-top: .8rem; min-width: 0; }
.expert h3 span { color: var(--soft); font-weight: 400; font-size: .86rem; margin-left: .6em; }
.tops { list-style: none; margin: 0; padding: 0; display: grid; gap: .45rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
.tops li { border: 1px solid var(--line); border-radius: 6px; padding: .35rem .6rem .4rem;
  background: var(--paper); min-width: 0; }
.where { display: flex; justify-content: space-between; gap: 1em; color: var(--soft);
  font-size: .78rem; font-variant-numeric: tabular-nums; }
.where b { color: var(--ink); font-weight: 600; }
pre { margin: .15rem 0 0; font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
pre mark { background: rgb(var(--mark) / calc(var(--a) * .78)); color: inherit;
  border-radius: 2px; padding: 1px 0; }
pre mark.peak { box-shadow: 0 0 0 1.5px var(--ink); font-weight: 600; }
pre .sign { color: var(--soft); }
.scale { display: inline-flex; align-items: center; gap: .4rem; font-size: .84rem; }
.scale i { width: 110px; height: 12px; border-radius: 2px; border: 1px solid var(--line);
  background: linear-gradient(90deg, rgb(var(--mark) / 0), rgb(var(--mark) / .78)); }
footer { margin-top: 3rem; color: var(--soft); font-size: .82rem; }
@media (max-width: 560px) {
  main { padding: 1.2rem .7rem 3rem; }
  h1 { font-size: 1.35rem; }
  .facts { grid-template-columns: repeat(2, 1fr); }
  svg .tick { font-size: 16px; }
  svg.wide { min-width: 640px; }
  figure { overflow-x: auto; }
}
@media print { details.layer { break-inside: avoid; } nav { display: none; } }
"""
