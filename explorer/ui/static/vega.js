// The one copy of Vega on a page: charts find it by waiting for globalThis.explorerVega.
const gate = (globalThis.explorerVega ??= Object.assign({}, (() => { let open; const ready = new Promise((r) => (open = r)); return { ready, open }; })()));
gate.open(vegaEmbed);
export default { initialize() {} };
