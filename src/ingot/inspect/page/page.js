"use strict";
const table = document.getElementById("table");
const body = table.tBodies[0];
const rows = Array.from(body.rows);
const heads = Array.from(table.tHead.rows[0].cells);
const order = rows.map((row, index) => index);
const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;

function sort(column) {
  const head = heads[column];
  const down = head.getAttribute("aria-sort") !== "descending";
  const numbers = !head.classList.contains("l") && !head.classList.contains("n");
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const compare = (one, other) => {
    const [a, b] = [value(rows[one], column), value(rows[other], column)];
    if (a === "" || b === "") return (a === "") - (b === "");
    const sign = numbers ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    return down ? -sign : sign;
  };
  order.sort((one, other) => compare(one, other) || one - other);
  body.append(...order.map((index) => rows[index]));
}

heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));

const search = document.getElementById("search");
const count = document.getElementById("count");
const texts = rows.map((row) => row.textContent.toLowerCase());
search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, index) => {
    row.hidden = !words.every((word) => texts[index].includes(word));
    shown += row.hidden ? 0 : 1;
  });
  count.textContent = `${shown} of ${rows.length} tensors`;
});

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => (item.open = true)));
