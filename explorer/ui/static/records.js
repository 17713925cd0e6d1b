// What was measured before, as a table. A row's actions travel as messages; files are read and written here, where their size is known before anything is sent.
const LARGEST = 1 << 20;

const make = (tag, props = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
};

function render({ model, el }) {
  const words = model.get("words");
  const act = (what, name) => model.send({ act: what, name });
  const say = make("p", { className: "ex-said" });
  say.setAttribute("role", "status");
  const file = make("input", { type: "file", accept: ".json,application/json", className: "ex-hidden" });
  const load = make("label", { className: "ex-tool ex-file" }, words.load, file);
  const body = make("tbody");
  const head = make("tr", {}, ...["compare", "job", "where", "peak", "estimate", ""].map((key) => make("th", { scope: "col", className: ["peak", "estimate"].includes(key) ? "ex-num" : key === "compare" ? "ex-pick" : "" }, key === "compare" ? make("span", { className: "ex-hidden" }, words.compare) : words[key] ?? "")));
  const table = make("table", { className: "ex-table" }, make("caption", { className: "ex-hidden" }, words.title), make("thead", {}, head), body);
  el.classList.add("ex-records");
  el.append(make("div", { className: "ex-bar" }, make("p", { className: "ex-dim" }, words.hint), load), say, make("div", { className: "ex-list" }, table));

  const button = (what, row, label) => {
    const b = make("button", { type: "button", className: what === "open" ? "ex-tool" : "ex-quiet", textContent: words[what] });
    b.dataset.key = `${what} ${row.name}`;
    b.setAttribute("aria-label", `${words[what]}: ${label}`);
    b.addEventListener("click", () => (what === "remove" ? sure(b, row) : act(what, row.name)));
    return b;
  };
  // What is removed is gone, so it is asked twice; looking away is a no.
  const sure = (b, row) => {
    if (b.dataset.sure) return act("remove", row.name);
    b.dataset.sure = "1";
    b.textContent = words.sure;
    b.addEventListener("blur", () => { delete b.dataset.sure; b.textContent = words.remove; }, { once: true });
  };
  const line = (row) => {
    const label = `${row.model}, ${row.words}`;
    const pick = make("input", { type: "checkbox" });
    pick.dataset.key = `compare ${row.name}`;
    pick.setAttribute("aria-label", `${words.compare}: ${label}`);
    pick.addEventListener("change", () => {
      const others = model.get("chosen").filter((name) => name !== row.name);
      model.set("chosen", pick.checked ? [...others, row.name].slice(-2) : others);
      model.save_changes();
    });
    const marks = [row.own && words.yours, row.shown && words.is_shown].filter(Boolean).map((word) => make("span", { className: "ex-tag" }, word));
    const tr = make("tr", {},
      make("td", { className: "ex-pick" }, pick),
      make("th", { scope: "row" }, make("span", { className: "ex-model" }, row.model), " ", ...marks, make("small", {}, row.words)),
      make("td", { className: "ex-place" }, row.where, make("small", {}, row.date)),
      make("td", { className: "ex-num" }, row.peak || make("span", { className: "ex-over" }, words.memory)),
      make("td", { className: "ex-num ex-near" }),
      make("td", { className: "ex-do" }, button("open", row, label), button("download", row, label), ...(row.own ? [button("remove", row, label)] : [])));
    tr.dataset.name = row.name;
    tr.classList.toggle("ex-shown", row.shown);
    return tr;
  };

  const fill = () => {
    const focused = el.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    body.replaceChildren(...model.get("rows").map(line));
    table.hidden = !model.get("rows").length;
    near();
    ticks();
    if (focused) [...el.querySelectorAll("[data-key]")].find((e) => e.dataset.key === focused)?.focus();
  };
  const near = () => { for (const tr of body.rows) tr.querySelector(".ex-near").textContent = model.get("estimates")[tr.dataset.name] ?? ""; };
  const ticks = () => { for (const tr of body.rows) tr.querySelector("input").checked = model.get("chosen").includes(tr.dataset.name); };
  const tell = () => {
    say.textContent = model.get("said") || (model.get("rows").length ? "" : words.none);
    say.classList.toggle("ex-alert", model.get("failed"));
  };
  const hear = (message) => {
    if (message.download) save(message.download, message.content, "application/json");
    if (message.opened) el.closest(".ex-root")?.querySelector(".ex-verdict")?.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  };

  file.addEventListener("change", async () => {
    const [given] = file.files;
    if (!given) return;
    if (given.size > LARGEST) model.send({ act: "refuse", name: given.name, n_bytes: given.size });
    else model.send({ act: "load", name: given.name }, undefined, [await given.arrayBuffer()]);
    file.value = "";
  });
  const bound = [["change:rows", fill], ["change:rows", tell], ["change:estimates", near], ["change:chosen", ticks], ["change:said", tell], ["change:failed", tell], ["msg:custom", hear]];
  for (const [event, follow] of bound) model.on(event, follow);
  fill();
  tell();
  return () => { for (const [event, follow] of bound) model.off(event, follow); };
}
export default { render };
