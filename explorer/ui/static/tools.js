// What only a browser can do: the page's address, the clipboard, dark and light, and names for controls that come without.

function named(root) {
  for (const box of root.querySelectorAll(".widget-radio")) {
    const label = box.querySelector(":scope > .widget-label"), group = box.querySelector(".widget-radio-box");
    if (label && group && !group.hasAttribute("role")) {
      group.setAttribute("role", "radiogroup");
      group.setAttribute("aria-label", label.textContent);
    }
  }
  const parts = { ".ex-side": ["complementary", "Settings"], ".ex-verdict": ["status", "Verdict"], ".ex-details": ["region", "Details"] };
  for (const [selector, [role, name]] of Object.entries(parts)) {
    for (const part of root.querySelectorAll(selector)) if (part.getAttribute("role") !== role) { part.setAttribute("role", role); part.setAttribute("aria-label", name); }
  }
  for (const button of root.querySelectorAll(".ex-disclosure")) button.setAttribute("aria-expanded", button.classList.contains("ex-open"));
}

async function copyBy(button, text, done) {
  await copy(text);
  const before = button.textContent;
  button.textContent = done;
  setTimeout(() => (button.textContent = before), 1200);
}

function render({ model, el }) {
  el.classList.add("ex-tools");
  const words = model.get("words");
  const button = (key, act) => {
    const b = Object.assign(document.createElement("button"), { type: "button", className: "ex-tool", textContent: words[key] });
    b.addEventListener("click", () => act(b));
    el.append(b);
  };
  const link = () => `${location.origin}${location.pathname}${model.get("query") ? "?" + model.get("query") : ""}`;
  if (model.get("owns_page")) button("link", (b) => copyBy(b, link(), words.copied));
  button("job", (b) => copyBy(b, model.get("job"), words.copied));
  button("config", (b) => copyBy(b, model.get("config"), words.copied));
  if (model.get("owns_page")) button("theme", () => {
    const dark = document.body.dataset.jpThemeLight !== "false";
    document.body.dataset.jpThemeLight = String(!dark);
    try { localStorage.setItem("ex-theme", dark ? "dark" : "light"); } catch {}
  });

  let pending = 0;
  const follow = () => {
    if (!model.get("owns_page")) return;
    clearTimeout(pending);
    pending = setTimeout(() => history.replaceState(null, "", link()), 250);
  };
  model.on("change:query", follow);

  let queued = false;
  const root = () => el.closest(".ex-root");
  const observer = new MutationObserver(() => {
    if (queued || !root()) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; if (root()) named(root()); });
  });
  const start = () => { const r = root(); if (r) { named(r); observer.observe(r, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] }); } else requestAnimationFrame(start); };
  start();
  return () => { model.off("change:query", follow); observer.disconnect(); };
}
export default { render };
