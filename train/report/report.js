"use strict";
// Search and order of the list of experts; without it the page has both as they are written.
(() => {
  const list = document.querySelector(".lines"), form = document.querySelector("#experts form");
  const [search, order] = form.querySelectorAll("input, select"), said = form.querySelector("output");
  const lines = [...list.children];
  const texts = lines.map(line =>
    [line.id, line.textContent, line.dataset.words].join(" ").toLowerCase());
  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    lines.forEach((line, number) => {
      line.hidden = !words.every(word => texts[number].includes(word));
      found += !line.hidden;
      const top = document.getElementById(line.id + "-top");
      if (top) top.hidden = line.hidden;
    });
    said.textContent = words.length ? `${found} of ${lines.length} experts` : "";
  };
  const value = (line, key) => key in line.dataset ? Number(line.dataset[key]) : -1;
  const sort = () => {
    const key = order.value, sign = key === "place" ? 1 : -1;
    list.append(...[...lines].sort((a, b) => sign * (value(a, key) - value(b, key))));
  };
  // A link into a part that is folded away opens it.
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    const folded = target && target.closest("details:not([open])");
    if (folded) { folded.open = true; target.scrollIntoView(); }
  };
  search.addEventListener("input", find);
  order.addEventListener("change", sort);
  addEventListener("hashchange", open);
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  open();
})();
