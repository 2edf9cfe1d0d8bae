"use strict";
// The search over all pages: every word must occur; a title counts more than the text.

const clinrl = { index: [] };

function make(tag, attributes, text) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function find(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  return clinrl.index
    .map(([title, url, text]) => {
      const [head, body] = [title.toLowerCase(), text.toLowerCase()];
      if (!words.every((word) => head.includes(word) || body.includes(word))) return null;
      const score = words.reduce((sum, word) => sum + (head === word ? 9 : head.includes(word) ? 3 : 0), 0);
      const at = Math.max(0, body.indexOf(words.find((word) => body.includes(word)) ?? "") - 60);
      return { title, url, score, text: (at ? "… " : "") + text.slice(at, at + 200) };
    })
    .filter(Boolean)
    .sort((a, b) => b.score - a.score);
}

function show(query) {
  const found = find(query);
  document.getElementById("count").textContent = query ? `${found.length} found.` : "Type a word above.";
  document.getElementById("found").replaceChildren(...found.slice(0, 60).map(({ title, url, text }) => {
    const item = make("li", {}, "");
    item.append(make("a", { href: url }, title), make("p", {}, text));
    return item;
  }));
}

addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("search");
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  field.addEventListener("input", () => show(field.value.trim()));
  show(field.value.trim());
  field.focus();
});
