// The doctor's panel: what is pasted goes out once it rests, HTML (escaped where it is made) comes in, and presses of its buttons travel as messages.
const LARGEST = 1 << 20, PAUSE_MS = 150;

function render({ model, el }) {
  const words = model.get("words");
  const id = `ex-doctor-${Math.random().toString(36).slice(2, 10)}`;
  el.classList.add("ex-doctor");
  el.innerHTML = `<h2></h2><label for="${id}"></label><textarea id="${id}" rows="2" spellcheck="false" autocomplete="off" autocapitalize="off" aria-describedby="${id}-said"></textarea>
    <p id="${id}-said" class="ex-said" role="status"></p><p class="ex-hidden" role="status"></p><div data-part="reading"></div><div data-part="advice"></div><div data-part="more"></div>
    <details class="ex-fold ex-away"><summary></summary><div data-part="files"></div></details>`;
  el.setAttribute("role", "region");
  el.setAttribute("aria-label", words.title);
  el.querySelector("h2").textContent = words.title;
  el.querySelector("label").textContent = words.label;
  const area = el.querySelector("textarea"), said = el.querySelector(".ex-said"), heard = el.querySelector(".ex-hidden"), away = el.querySelector(".ex-away");
  area.placeholder = words.placeholder;
  away.querySelector("summary").textContent = words.out;

  let timer = 0;
  let own = false;
  const send = () => {
    const large = area.value.length > LARGEST;
    own = true;
    model.set({ text: large ? "" : area.value, too_large: large ? area.value.length : 0 });
    own = false;
    model.save_changes();
  };
  area.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(send, PAUSE_MS); el.classList.toggle("ex-filled", area.value !== ""); });
  away.addEventListener("toggle", () => { model.set("files_open", away.open); model.save_changes(); });
  el.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-act]");
    if (!button) return;
    const { act, name } = button.dataset;
    const content = button.closest("section")?.querySelector("pre").textContent;
    if (act === "copy") copy(content).then(() => { button.textContent = words.copied; setTimeout(() => (button.textContent = words.copy), 1200); });
    else if (act === "save") save(name, content, "text/plain");
    else model.send({ act, name });
  });

  const show = () => { if (!own && model.get("text") !== area.value) area.value = model.get("text"); el.classList.toggle("ex-filled", area.value !== ""); };
  const tell = () => { said.textContent = model.get("said"); heard.textContent = model.get("heard"); said.classList.toggle("ex-alert", model.get("wrong")); el.classList.toggle("ex-busy", model.get("busy")); };
  const fill = (part) => {
    const box = el.querySelector(`[data-part="${part}"]`);
    const focused = box.contains(document.activeElement) ? { ...document.activeElement.dataset } : null;
    const open = new Set([...box.querySelectorAll("details[open]")].map((fold) => fold.dataset.fold));
    box.innerHTML = model.get(part);
    for (const fold of box.querySelectorAll("details")) fold.open = open.has(fold.dataset.fold);
    // A row that comes into use loses its Apply: focus stays near.
    const places = [...box.querySelectorAll("button[data-act]:enabled")];
    if (focused?.act) (places.find((b) => b.dataset.act === focused.act && b.dataset.name === focused.name) ?? places.find((b) => b.dataset.name === focused.name) ?? places[0])?.focus();
  };
  // Who has pasted waits for the answer, which is longer than what is left of the window.
  const answered = () => {
    if (document.activeElement === area && model.get("reading")) el.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  };
  const bound = [["change:text", show], ["change:said", tell], ["change:heard", tell], ["change:wrong", tell], ["change:busy", tell], ...["reading", "advice", "more", "files"].map((part) => [`change:${part}`, () => fill(part)]), ["change:reading", answered]];
  for (const [event, follow] of bound) model.on(event, follow);
  show();
  tell();
  for (const part of ["reading", "advice", "more", "files"]) fill(part);
  return () => { clearTimeout(timer); for (const [event, follow] of bound) model.off(event, follow); };
}
export default { render };
