// A count: a text field that keeps what is typed, and a slider over a ladder of sensible values.
// Each widget imports this module anew, so a counter here would give every field the same id.
const unique = () => Math.random().toString(36).slice(2, 10);

function render({ model, el }) {
  const id = `ex-number-${unique()}`;
  el.classList.add("ex-number");
  el.innerHTML = `<div class="ex-number-row"><label for="${id}"></label><input id="${id}" type="text" inputmode="numeric" autocomplete="off" spellcheck="false" aria-describedby="${id}-notice"></div>
    <input type="range" min="0" step="1"><p id="${id}-notice" class="ex-notice" role="status"></p>`;
  const label = el.querySelector("label"), text = el.querySelector("input[type=text]"), range = el.querySelector("input[type=range]"), notice = el.querySelector("p");
  const ladder = () => model.get("ladder");
  const number = () => Number(String(model.get("value") || model.get("placeholder")).replace(/[,_ ]/g, ""));

  const place = () => {
    const steps = ladder(), at = number();
    let index = steps.findLastIndex((step) => step <= at);
    range.max = Math.max(0, steps.length - 1);
    range.value = Math.max(0, index);
    range.style.setProperty("--at", steps.length > 1 ? Math.max(0, index) / (steps.length - 1) : 0);
    range.setAttribute("aria-valuetext", `${Number.isFinite(at) ? at : text.value} ${model.get("unit")}`.trim());
    range.hidden = steps.length < 2;
  };
  const show = () => {
    if (text.value !== model.get("value")) text.value = model.get("value");
    text.placeholder = model.get("placeholder");
    place();
  };
  const dress = () => {
    label.textContent = model.get("label");
    range.setAttribute("aria-label", model.get("label"));
    notice.textContent = model.get("notice");
    notice.hidden = !model.get("notice");
    text.setAttribute("aria-invalid", model.get("wrong"));
    el.classList.toggle("ex-wrong", model.get("wrong"));
    text.disabled = range.disabled = model.get("disabled");
    el.classList.toggle("ex-off", model.get("disabled"));
  };
  const send = (value) => { model.set("value", value); model.save_changes(); };

  text.addEventListener("input", () => { send(text.value); place(); });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const steps = ladder(), at = number();
    const next = step > 0 ? steps.find((s) => s > at) : steps.findLast((s) => s < at);
    if (next !== undefined) { send(String(next)); show(); }
  });
  range.addEventListener("input", () => { send(String(ladder()[range.value])); show(); });
  const bound = [["change:value", show], ["change:placeholder", show], ["change:ladder", show], ["change:label", dress], ["change:notice", dress], ["change:wrong", dress], ["change:disabled", dress]];
  for (const [event, act] of bound) model.on(event, act);
  dress();
  show();
  return () => { for (const [event, act] of bound) model.off(event, act); };
}
export default { render };
