// Tables sort by a click on their header, and a filter hides rows. Without this script the pages are complete too.
(() => {
  "use strict";
  const number = (text) => {
    const plain = text.replace(/[−–]/g, "-").replace(/,(?=\d{3})/g, "").replace(/^[×<>~≤≥÷\s]+/, "");
    const match = plain.match(/^-?\d*\.?\d+(e-?\d+)?/i);
    return match ? parseFloat(match[0]) : NaN;
  };
  const text = (row, column) => (row.cells[column] ? row.cells[column].textContent.trim() : "");

  const compare = (column, down) => (a, b) => {
    const [x, y] = [text(a, column), text(b, column)];
    if (!x || !y) return x ? -1 : y ? 1 : 0; // empty cells stay at the end
    const [m, n] = [number(x), number(y)];
    const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
    return down ? -order : order;
  };

  const sortable = (table) => {
    const body = table.tBodies[0];
    const heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
    if (!body || body.rows.length < 3) return;
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      if (!button.textContent.trim()) button.setAttribute("aria-label", "sort by this column");
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...[...body.rows].sort(compare(column, down)));
      });
    });
  };

  const filterable = (place, tables) => {
    const rows = tables.flatMap((table) => (table.tBodies[0] ? [...table.tBodies[0].rows] : []));
    const label = document.createElement("label");
    const input = document.createElement("input");
    const output = document.createElement("output");
    input.type = "search";
    input.placeholder = "filter rows, such as digits or NLL";
    input.setAttribute("aria-label", "filter rows");
    label.append(input);
    place.append(label, output);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      tables.forEach((table) => {
        const heads = table.tHead ? table.tHead.textContent.toLowerCase() : "";
        const title = (table.closest(".table-wrapper") || table).previousElementSibling;
        const about = heads + " " + (title && title.tagName === "P" ? title.textContent.toLowerCase() : "");
        const kept = [...table.tBodies[0].rows].filter((row) => {
          const said = row.textContent.toLowerCase() + " " + about;
          row.hidden = !words.every((word) => said.includes(word));
          return !row.hidden;
        });
        left += kept.length;
        (table.closest(".table-wrapper") || table).hidden = !kept.length;
        if (title && title.textContent.includes("all rows and the command")) title.hidden = !kept.length;
      });
      output.textContent = words.length ? `${left} of ${rows.length} rows` : "";
    });
  };

  // The folders of all versions lie beside that of this one, and versions.json beside them.
  const switchable = async (select) => {
    const root = new URL(select.dataset.root, location.href);
    const current = select.options[0].text;
    const answer = await fetch(new URL("../versions.json", root)).catch(() => null);
    if (!answer || !answer.ok) return; // one version only
    const versions = await answer.json();
    for (const { name, folder } of versions) {
      if (name !== current) select.add(new Option(name, folder));
    }
    select.addEventListener("change", () => {
      location.href = new URL(`../${select.value}/${select.dataset.page}.html`, root).href;
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("version");
    if (select && location.protocol.startsWith("http")) switchable(select);
    const tables = [...document.querySelectorAll("article table.docutils")];
    tables.forEach((table) => {
      sortable(table);
      [...table.querySelectorAll("td")].forEach((cell) => {
        const length = cell.textContent.trim().length;
        cell.classList.toggle("short", length <= 16); // a number, a date or a name is one line
        cell.classList.toggle("long", length > 60);
      });
      const box = table.closest(".table-wrapper");
      if (box && box.scrollWidth > box.clientWidth) {
        box.tabIndex = 0; // scrolls by keyboard
        box.setAttribute("role", "region");
        box.setAttribute("aria-label", "table, scrolls sideways");
      }
    });
    const place = document.querySelector(".table-filter");
    if (place) {
      const after = tables.filter((table) => place.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING);
      filterable(place, after.filter((table) => table.tBodies[0]));
    }
  });
})();
