"use strict";
// The answers of one version: a list with filters, and a comparison with the answers of another version. Text of cases
// and models becomes text nodes, never markup.

const clinrl = {
  kept: {},
  waiting: {},
  /** Receive the data of a file, which calls this: JSON, compressed by gzip, in Base64. */
  put(name, packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    this.waiting[name](new Response(plain).json());
  },
  /** The data of a name, loaded as a script: a page that was opened from disk may load nothing else. */
  get(name) {
    this.kept[name] ??= new Promise((resolve, reject) => {
      this.waiting[name] = resolve;
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onerror = () => reject(new Error(`answers/${script.getAttribute("src")} is missing`));
      document.head.append(script);
    });
    return this.kept[name];
  },
};

const PAGE = 60;
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function fail(error) {
  byId("count").textContent = `The answers cannot be shown: ${error.message}.`;
}

async function start() {
  if (!("DecompressionStream" in globalThis)) throw new Error("this browser is too old to unpack them");
  const form = byId("filter");
  const [mine, exam] = await Promise.all([clinrl.get(form.dataset.name), clinrl.get(`exam.${form.dataset.exam}`)]);
  const words = { r: "right", w: "wrong", s: mine.safety };
  const fields = new Map();
  let other = null;
  let shown = PAGE;

  function choice(key, label, options) {
    const select = make("select", { id: `by-${key}`, name: key });
    for (const [value, text] of options) select.append(make("option", { value }, text));
    form.append(make("div", {}, make("label", { for: select.id }, label), select));
    select.addEventListener("change", () => { shown = PAGE; store(); apply().catch(fail); });
    fields.set(key, select);
  }

  choice("mode", "mode", Object.keys(mine.modes).map((mode) => [mode, mode]));
  choice("verdict", "answer", [["", "any"], ["wrong", "wrong"], ["s", words.s], ["r", "right"]]);
  exam.slices.forEach((slice, place) => {
    choice(slice, slice, [["", "any"], ...exam.values[place].map((value) => [value, value])]);
  });
  const others = form.dataset.others.trim().split(" ").filter(Boolean);
  if (others.length) choice("with", "beside", [["", "no other version"], ...others.map((one) => [one, one])]);

  const value = (key) => fields.get(key)?.value ?? "";

  function load() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [key, select] of fields) {
      const wanted = given.get(key) ?? (key === "mode" ? select.options[0].value : "");
      if ([...select.options].some((option) => option.value === wanted)) select.value = wanted;
    }
    return given.get("case");
  }

  function store(opened = "") {
    const kept = new URLSearchParams();
    for (const [key, select] of fields) if (select.value) kept.set(key, select.value);
    if (opened) kept.set("case", opened);
    history.replaceState(null, "", `#${kept}`);
  }

  async function apply(opened = "") {
    const wanted = value("with");
    let found = null;
    if (wanted) {
      const data = await clinrl.get(wanted);
      const theirs = await clinrl.get(`exam.${data.exam}`);
      found = { data, exam: theirs, places: new Map(theirs.cases.map((one, at) => [one[0], at])) };
    }
    if (wanted !== value("with")) return; // another was chosen meanwhile, and is listed when its data come
    other = found;
    list(opened);
  }

  /** The cases that pass the filter: place, verdicts, and whether the transcript is here. */
  function chosen() {
    const mode = mine.modes[value("mode")];
    const theirs = other?.data.modes[value("mode")];
    const found = [];
    exam.cases.forEach(([id, traits], at) => {
      const verdict = mode.verdicts[at];
      const asked = value("verdict");
      if (asked && (asked === "wrong" ? verdict === "r" : verdict !== asked)) return;
      if (exam.slices.some((slice, place) => value(slice) && value(slice) !== traits[place])) return;
      const there = theirs ? other.places.get(id) : undefined;
      found.push({ id, at, verdict, there, theirs: there === undefined ? "" : theirs.verdicts[there],
        here: at in mode.shown });
    });
    const urgency = (one) => ("swr".indexOf(one.verdict) + (one.here ? 0 : 3));
    return found.sort((a, b) => group(a) - group(b) || urgency(a) - urgency(b) || a.at - b.at);
  }

  /** The rank of a case in a comparison: first those that are wrong here alone, then those that are right here alone;
      those that the other was not asked come last. */
  function group({ verdict, theirs }) {
    if (!theirs) return other ? 4 : 0;
    if ((verdict === "r") !== (theirs === "r")) return verdict === "r" ? 1 : 0;
    return verdict === "r" ? 3 : 2;
  }

  function list(opened) {
    const found = chosen();
    const titles = other
      ? [`wrong here, right in ${other.data.name}`, `right here, wrong in ${other.data.name}`, "wrong in both",
        "right in both", `not asked of ${other.data.name}`]
      : [""];
    const place = found.findIndex((one) => one.id === opened);
    const visible = found.slice(0, Math.max(shown, place + 1));
    const parts = [];
    titles.forEach((title, number) => {
      const members = visible.filter((one) => group(one) === number);
      const count = found.filter((one) => group(one) === number).length;
      if (other && count) parts.push(make("h2", {}, `${title}: ${count}`));
      parts.push(...members.map((one) => entry(one, one.id === opened)));
    });
    byId("list").replaceChildren(...parts);
    const here = found.filter((one) => one.here).length;
    byId("count").textContent = `${found.length} of ${exam.cases.length} cases, ${here} of them with their transcript.`;
    byId("more").hidden = visible.length >= found.length;
    if (place >= 0) byId(`case-${opened}`)?.scrollIntoView();
  }

  function entry(one, open) {
    const traits = exam.cases[one.at][1].map((trait, place) => `${exam.slices[place]} ${trait}`).join("; ");
    const box = make("details", { id: `case-${one.id}`, class: "answer" }, make("summary", {},
      make("span", { class: `badge v-${one.verdict}` }, words[one.verdict]),
      one.theirs ? make("span", { class: `badge v-${one.theirs}` }, `${other.data.name}: ${words[one.theirs]}`) : null,
      ` ${one.id} `, make("span", { class: "traits" }, traits)));
    box.addEventListener("toggle", () => {
      if (!box.open) return;
      if (box.childElementCount === 1) box.append(...full(one));
      store(one.id);
    });
    if (open) box.open = true;
    return box;
  }

  function full(one) {
    const columns = [column(mine, one.at, one.id)];
    if (one.theirs) columns.push(column(other.data, one.there, one.id));
    const request = (title, text) =>
      text ? make("section", {}, make("h3", {}, title), make("pre", { tabindex: "0" }, text)) : null;
    // A model that sees the cases in another variant has requests of its own.
    const theirs = one.theirs && other.data.exam !== mine.exam ? other.exam.requests[one.there] : "";
    return [
      request("Request", exam.requests[one.at]),
      request(`Request to ${other?.data.name}`, theirs),
      make("div", { class: columns.length > 1 ? "side-by-side" : "" }, ...columns),
    ].filter(Boolean);
  }

  function column(data, at, id) {
    const answer = data.modes[value("mode")].shown[at];
    const head = make("h3", {}, `${data.name}, mode ${value("mode")}`);
    if (!answer) {
      const command = make("code", {}, `clinrl show ${data.name} ${id} --mode ${value("mode")}`);
      return make("section", {}, head, make("p", {}, "Not on this page: ", command, " prints it."));
    }
    const steps = make("dl", { class: "steps" });
    for (const [what, text] of answer.steps) {
      if (what === "turn") steps.append(make("div", { class: "turn" }, make("dt", {}, `Turn ${text}`), make("dd")));
      else steps.append(make("div", { class: what }, make("dt", {}, what === "answered" ? "→" : what), make("dd", {}, text)));
    }
    const decided = make("tbody", {}, ...answer.parts.map(([about, right, given]) => make("tr", {},
      make("th", { scope: "row" }, about), make("td", {}, given),
      make("td", {}, given === right ? "right" : `wrong: ${right}`))));
    const terms = make("tbody", {}, ...answer.terms.map(([term, points]) => make("tr", {},
      make("th", { scope: "row" }, term), make("td", {}, (points > 0 ? "+" : "") + points.toFixed(4)))));
    return make("section", {}, head, steps,
      make("p", {}, `The end: ${answer.end}.`),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "What was decided, and the score" },
        make("table", {}, make("caption", {}, "Decided"), decided),
        make("table", {}, make("caption", {}, `Score ${answer.total.toFixed(4)}${answer.terms.length ? "" : ", of no term"}`),
          terms)));
  }

  byId("more").addEventListener("click", () => {
    const open = [...document.querySelectorAll("#list details[open]")].map((box) => box.id);
    shown += PAGE;
    list("");
    for (const id of open) byId(id).open = true;
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => apply(load()).catch(fail));
  await apply(load());
}

addEventListener("DOMContentLoaded", () => start().catch(fail));
