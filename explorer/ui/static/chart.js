// One Vega-Lite view whose data set "rows" follows a trait: new rows never rebuild it.
const gate = (globalThis.explorerVega ??= (() => { let open; const ready = new Promise((r) => (open = r)); return { ready, open }; })());

// Columns travel, rows are what Vega reads.
function rows(columns) {
  const names = Object.keys(columns);
  const n = names.length ? columns[names[0]].length : 0;
  return Array.from({ length: n }, (_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

async function render({ model, el }) {
  el.classList.add("ex-chart");
  const host = el.appendChild(document.createElement("div"));
  const embed = await gate.ready;
  const { view, finalize } = await embed(host, structuredClone(model.get("spec")), { actions: false, renderer: "svg", tooltip: { theme: "ex" } });
  const describe = () => host.querySelector("svg")?.setAttribute("aria-label", model.get("description"));
  const refresh = async () => {
    await view.data("rows", rows(model.get("columns"))).resize().runAsync();
    el.dataset.version = model.get("version");
    describe();
  };
  const fit = () => host.clientWidth && view.signal("width", Math.max(120, host.clientWidth - 0)).resize().runAsync();
  const observer = new ResizeObserver(fit);
  observer.observe(host);
  model.on("change:columns", refresh);
  model.on("change:description", describe);
  await refresh();
  return () => { model.off("change:columns", refresh); model.off("change:description", describe); observer.disconnect(); finalize(); };
}
export default { render };
