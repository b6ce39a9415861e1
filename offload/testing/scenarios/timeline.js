// What a page can do without: details at once instead of after a second, rows by name, a button that copies.
"use strict";
const by = (id) => document.getElementById(id);
const detail = by("detail");
for (const title of document.querySelectorAll(".plot title")) {
  title.parentNode.dataset.said = title.textContent;
  title.remove(); // or the browser shows it a second time
}
document.querySelector(".plot").addEventListener("mouseover", (event) => {
  const marked = event.target.closest("[data-said]");
  detail.hidden = !marked;
  if (marked) detail.textContent = marked.dataset.said;
});
document.querySelector(".scroll").addEventListener("mouseleave", () => (detail.hidden = true));

const containers = [...document.querySelectorAll(".row.container")];
by("tools").hidden = containers.length < 8;
by("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of containers) {
    const tags = row.dataset.tags.toLowerCase();
    row.hidden = !wanted.every((word) => tags.includes(word));
    shown += !row.hidden;
  }
  by("shown").textContent = wanted.length ? `${shown} of ${containers.length} rows` : "";
});

if (navigator.clipboard) {
  by("copy").hidden = false;
  by("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(by("repeat").textContent);
    by("copy").textContent = "copied";
  });
}
