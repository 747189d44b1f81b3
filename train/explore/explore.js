"use strict";
// The page of `polyad explore`. Text of models and of users gets into the page as text alone:
// `element` takes strings as text nodes, and nothing here writes HTML.

const state = {
  hows: [], models: [], views: [], text: "",
  interventions: [],  // {text, isOn}
  chosen: null,       // {model, token, layer}
  expert: null,       // a column of the chosen layer
  asked: 0,           // numbers requests, so that only the answer to the last one is shown
};

const byId = (id) => document.getElementById(id);

function element(name, attributes, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "css") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", body: JSON.stringify(body), headers: {"Content-Type": "application/json"},
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("no answer: does polyad explore still run?");
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(found.error || `the server answers ${response.status}`);
  return found;
}

function say(text, isError) {
  byId("status").textContent = text;
  byId("status").className = isError ? "error" : "soft";
}

// Numbers and colours

const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "not finite";
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1);
  return value.toFixed(digits);
};
const signed = (value, digits = 3) => {
  const rounded = Number(value.toFixed(digits));  // also -0.000 becomes 0.000
  return (rounded > 0 ? "+" : "") + (rounded || 0).toFixed(digits);
};
// The same hues as `hue` in view.py.
const colour = (expert, weight, strongest) => {
  const share = strongest ? Math.min(1, Math.abs(weight || 0) / strongest) : 0;
  return `hsl(${(expert * 137.508) % 360} 65% 50% / ${0.1 + 0.6 * share})`;
};

function expertName(layer, column) {
  if (layer.levels.length === 1) return String(column);
  let level = 0;
  while (column >= layer.levels[level]) column -= layer.levels[level++];
  return `${level}.${column}`;
}

// Asking for a text

async function show(interventions) {
  const asked = ++state.asked;
  const on = interventions.filter((each) => each.isOn).map((each) => each.text);
  say("reading");
  byId("show").disabled = true;
  try {
    const found = await ask("view", {text: state.text, interventions: on});
    if (asked !== state.asked) return;
    state.interventions = interventions;
    state.views = found.views;
    keepChoice();
    say("");
    render();
  } catch (error) {
    if (asked !== state.asked) return;
    say(error.message, true);
    renderInterventions();
  } finally {
    byId("show").disabled = false;
  }
}

function keepChoice() {
  const chosen = state.chosen;
  const view = chosen && state.views[chosen.model];
  if (view && chosen.token < view.tokens.length && chosen.layer < view.layers.length) return;
  state.chosen = {model: 0, token: state.views[0].tokens.length - 1, layer: 0};
  state.expert = null;
}

// Interventions

function renderInterventions() {
  byId("changes").hidden = !state.views.length;
  byId("interventions").replaceChildren(...state.interventions.map((each, index) => {
    const others = () => state.interventions.filter((_, place) => place !== index);
    const box = element("input", {type: "checkbox", id: `on-${index}`, onchange: () => {
      const changed = {text: each.text, isOn: !each.isOn};
      show(state.interventions.map((one, place) => (place === index ? changed : one)));
    }});
    box.checked = each.isOn;
    return element("li", null,
      element("label", null, box, ` ${each.text}`),
      element("button", {
        type: "button", "aria-label": `remove ${each.text}`, onclick: () => show(others()),
      }, "remove"));
  }));
}

function actionForm(layer, column) {
  const how = element("select", {"aria-label": "action", id: "how"},
    ...state.hows.map((name) => element("option", {value: name}, name)));
  const to = element("input", {type: "number", min: 0, "aria-label": "to expert", id: "to"});
  const value = element("input", {type: "number", step: "any", "aria-label": "value", id: "value"});
  const toLabel = element("label", null, "to expert ", to);
  const valueLabel = element("label", null, "value ", value);
  const update = () => {
    toLabel.hidden = how.value !== "swap";
    valueLabel.hidden = !["scale", "clamp"].includes(how.value);
  };
  how.addEventListener("change", update);
  update();
  const form = element("form", {css: "row", id: "act"}, how, toLabel, valueLabel,
    element("button", {id: "add"}, "Add intervention"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    let text = `layer=${layer.block},expert=${column},how=${how.value}`;
    if (!toLabel.hidden) text += `,to=${to.value}`;
    if (!valueLabel.hidden) text += `,value=${value.value}`;
    show([...state.interventions, {text, isOn: true}]);
  });
  return form;
}

// The grids

function render() {
  byId("shown").hidden = false;
  keepingFocus(() => {
    renderInterventions();
    byId("views").replaceChildren(...state.views.map(renderView));
    renderDetails();
  });
}

// What is made anew has the same id, and who works with keys goes on where they were.
function keepingFocus(work) {
  const {id} = document.activeElement;
  work();
  const again = id && byId(id);
  if (again && again !== document.activeElement) again.focus({preventScroll: true});
}

function renderView(view, model) {
  const {plain, changed} = view;
  const parts = [
    state.views.length > 1 ? element("h2", null, view.name) : null,
    element("p", {css: "note", id: `sum-${model}`}, ...summary(view, model)),
  ];
  const heads = ["token", "loss", ...(changed ? ["change"] : [])];
  const head = element("tr", null,
    ...heads.map((name) => element("th", {scope: "col"}, name)),
    ...view.layers.map((layer) => element("th", {scope: "col"}, layer.title)));
  const highest = Math.max(1e-9, ...plain.losses.filter((loss) => loss !== null));
  const rows = view.tokens.map((token, t) => {
    const loss = element("td", {css: "number"}, t ? number(plain.losses[t]) : "");
    if (plain.losses[t] !== null) {
      loss.style.backgroundColor = `rgb(var(--mark) / ${0.45 * plain.losses[t] / highest})`;
    }
    return element("tr", null,
      element("th", {scope: "row", title: token}, token),
      loss,
      changed ? change(plain.losses[t], changed.losses[t], t) : null,
      ...view.layers.map((_, l) => element("td", null, renderCell(view, model, t, l))));
  });
  const table = element("table", {css: "routes", onkeydown: moveFocus},
    element("thead", null, head), element("tbody", null, ...rows));
  parts.push(element("div", {css: "scroll"}, table));
  return element("div", {css: "view"}, ...parts);
}

function change(before, after, token) {
  if (!token) return element("td", {css: "number"});
  if (before === null || after === null) return element("td", {css: "number"}, "not finite");
  const by = after - before;
  const css = by > 5e-4 ? "worse" : by < -5e-4 ? "better" : "soft";
  return element("td", {css: `number ${css}`}, signed(by));
}

function summary(view, model) {
  const said = [];
  const {plain, changed, tokens} = view;
  if (tokens.length > 1) {
    said.push("loss ", element("b", {css: "loss"}, number(plain.loss, 4)));
    if (changed) {
      said.push(" \u2192 ", element("b", {css: "changed"}, number(changed.loss, 4)));
      if (changed.loss !== null && plain.loss !== null) {
        const by = changed.loss - plain.loss;
        said.push(` (${signed(by, 4)} nats a token, ${signed(by * (tokens.length - 1))} in all)`);
      }
    } else said.push(" nats a token");
    said.push("; ");
  }
  said.push(`${tokens.length} tokens. `);
  if (model && !view.same_tokens) said.push("Its tokens are others: routes are not compared.");
  else if (model || changed) {
    const flat = Object.values(view.moved).flat();
    const moved = flat.filter(Boolean).length;
    const beside = model ? "in the first model" : "without interventions";
    if (flat.length) said.push(`Dashed: other experts than ${beside}, ${moved} of ${flat.length} cells.`);
    else said.push("No layer has as many experts as one of the first model: routes are not compared.");
  }
  return said;
}

function renderCell(view, model, token, l) {
  const layer = view.layers[l];
  const pass = view.changed || view.plain;
  const used = pass.cells[l][token].filter(([, weight]) => weight !== null);
  const moved = (view.moved[layer.name] || [])[token];
  const isMany = used.length > 3;
  const chosen = state.chosen;
  const isChosen = chosen.model === model && chosen.token === token && chosen.layer === l;
  const names = used.map(([expert, weight]) => `${expertName(layer, expert)}: ${number(weight)}`);
  const cell = element("button", {
    type: "button", id: cellId({model, token, layer: l}),
    css: `cell${isMany ? " many" : ""}${moved ? " moved" : ""}`,
    title: `${layer.title}, experts ${names.join(", ")}${moved ? " (others than before)" : ""}`,
    "aria-label": `${view.tokens[token]}, ${layer.title}: experts ${names.join(", ")}`,
    "aria-pressed": isChosen,
    tabindex: isChosen ? 0 : -1,
    "data-model": model, "data-token": token, "data-layer": l,
    onclick: (event) => choose(event.currentTarget),
  }, ...used.map(([expert, weight]) => {
    const part = element("i", null, isMany ? "" : expertName(layer, expert));
    part.style.backgroundColor = colour(expert, weight, pass.strongest[l]);
    return part;
  }));
  return cell;
}

const cellId = ({model, token, layer}) => `cell-${model}-${token}-${layer}`;
const cellAt = (place) => byId(cellId(place));

function choose(cell) {
  const before = cellAt(state.chosen);
  if (before) {
    before.setAttribute("aria-pressed", false);
    before.tabIndex = -1;
  }
  cell.setAttribute("aria-pressed", true);
  cell.tabIndex = 0;
  const old = state.chosen;
  state.chosen = Object.fromEntries(
    ["model", "token", "layer"].map((key) => [key, Number(cell.dataset[key])]));
  if (old.model !== state.chosen.model || old.layer !== state.chosen.layer) state.expert = null;
  renderDetails();
}

function moveFocus(event) {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  if (!(event.key in step) || !event.target.dataset.token) return;
  const {model, token, layer} = event.target.dataset;
  const [down, right] = step[event.key];
  const next = cellAt({model, token: Number(token) + down, layer: Number(layer) + right});
  event.preventDefault();
  if (!next) return;
  next.focus();
  choose(next);
}

// Details of the chosen token and layer

function renderDetails() {
  const {model, token, layer: l} = state.chosen;
  const view = state.views[model];
  const layer = view.layers[l];
  const pass = view.changed || view.plain;
  const experts = pass.cells[l][token];
  if (state.expert === null) state.expert = experts[0][0];
  const parts = [
    element("h2", null, `${view.tokens[token]} \u00b7 ${layer.title}`),
    element("p", {css: "note"}, `Token ${token} of ${view.tokens.length - 1}` +
      (token ? `, loss ${number(view.plain.losses[token])}` : ", which nothing predicts") +
      (token && view.changed ? ` \u2192 ${number(view.changed.losses[token])}` : "")),
    expertTable(view, layer, experts, pass.strongest[l]),
  ];
  const before = view.plain.cells[l][token].filter(([, weight]) => weight !== null);
  if (view.changed) {
    const names = before.map(([expert, weight]) =>
      `${expertName(layer, expert)} (${number(weight, 2)})`);
    parts.push(element("p", {css: "note"}, `Without interventions: ${names.join(", ")}`));
  }
  const card = element("div", {id: "card"});
  parts.push(
    element("h3", null, `Expert ${expertName(layer, state.expert)} of ${layer.title}`),
    actionForm(layer, state.expert), card,
    element("h3", null, "Most probable next tokens"), nextTable(view, token));
  byId("details").replaceChildren(...parts);
  renderCard(card, {model, layer: layer.name, expert: state.expert});
}

function expertTable(view, layer, experts, strongest) {
  const rows = experts.map(([expert, weight, score]) => {
    const chip = element("button", {
      type: "button", id: `chip-${expert}`, css: "chip", "aria-pressed": expert === state.expert,
      onclick: () => {
        state.expert = expert;
        keepingFocus(renderDetails);
      },
    }, `expert ${expertName(layer, expert)}`);
    chip.style.backgroundColor = colour(expert, weight, strongest);
    return element("tr", null, element("td", null, chip),
      element("td", null, weight === null ? "not used" : number(weight, 4)),
      element("td", null, number(score, 4)));
  });
  const heads = ["", "weight", "score"].map((name) => element("th", {scope: "col"}, name));
  return element("table", {id: "experts"},
    element("thead", null, element("tr", null, ...heads)), element("tbody", null, ...rows));
}

function nextTable(view, token) {
  const likely = view.next[token];
  const most = Math.max(1e-9, ...likely.flatMap((each) => [each.probability, each.changed || 0]));
  const bar = (value, css) => {
    const made = element("i", {css});
    made.style.width = `${(100 * (value || 0)) / most}%`;
    return made;
  };
  const heads = ["token", "", "probability", ...(view.changed ? ["changed"] : [])];
  return element("table", {id: "next"},
    element("thead", null, element("tr", null,
      ...heads.map((name) => element("th", {scope: "col"}, name)))),
    element("tbody", null, ...likely.map((each) => element("tr", null,
      element("td", {css: "text", title: each.token}, each.token),
      element("td", {css: "bars"}, bar(each.probability, "bar"),
        view.changed ? bar(each.changed, "bar after") : null),
      element("td", null, number(each.probability)),
      view.changed ? element("td", null, number(each.changed)) : null))));
}

async function renderCard(place, asked) {
  let found;
  try {
    found = await ask(`card?${new URLSearchParams(asked)}`);
  } catch (error) {
    found = {state: error.message, is_reading: false};
  }
  if (!place.isConnected) return;
  const parts = [element("p", {css: "note"}, found.state)];
  if (found.load !== undefined) {
    const share = (value) => `${(100 * value).toFixed(1)} %`;
    parts.push(element("p", {css: "note"}, `load ${number(found.load, 2)} times the mean, ` +
      `used by ${share(found.active)} of the tokens, at least half of ${share(found.dominant)}`));
    const shown = found.words.length ? found.words : found.every;
    parts.push(...shown.map(renderContext));
    if (!shown.length) parts.push(element("p", {css: "note"}, "No token uses it."));
  }
  place.replaceChildren(...parts);
  if (found.is_reading) setTimeout(() => place.isConnected && renderCard(place, asked), 1000);
}

function renderContext(snippet) {
  const most = Math.max(1e-9, ...snippet.pieces.map((each) => each.coefficient));
  return element("p", {css: "context", title: `weight ${number(snippet.coefficient)}`},
    ...snippet.pieces.map((each) => {
      const part = element(each.is_peak ? "b" : "span", null, each.text);
      const share = Math.max(0, each.coefficient) / most;
      if (share) part.style.backgroundColor = `rgb(var(--mark) / ${0.5 * share})`;
      return part;
    }));
}

// The beginning

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  state.text = byId("text").value;
  show(state.interventions);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
ask("about").then((found) => {
  state.models = found.models;
  state.hows = found.hows;
  byId("models").textContent = found.models.join(" and ");
}).catch((error) => say(error.message, true));
