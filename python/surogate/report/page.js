// Values under the pointer, and the place on the page kept when it is loaded anew. The page is whole without it.
"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  const plot = figure.querySelector(".plot");
  const { x, lines } = JSON.parse(figure.querySelector("script").textContent);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor"; tip.className = "tip card";
  const nearest = (points, at) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; points[middle][0] < at ? (low = middle) : (high = middle); }
    return at - points[low][0] < points[high][0] - at ? points[low] : points[high];
  };
  const number = (value) => (Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3))
    ? value.toExponential(2) : String(+value.toPrecision(4));
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = x[0] + (x[1] - x[0]) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const main = lines.reduce((a, b) => (b.p.length > a.p.length ? b : a));
    const step = nearest(main.p, at)[0], place = (step - x[0]) / (x[1] - x[0] || 1);
    tip.replaceChildren();
    const head = document.createElement("div"); head.textContent = "step " + step; tip.append(head);
    for (const line of lines) {
      const point = nearest(line.p, step);
      if (Math.abs(point[0] - step) > (x[1] - x[0]) / 40) continue;
      const row = document.createElement("div"), name = document.createElement("span");
      name.className = "k c" + line.c; name.textContent = line.n + "  " + number(point[1]);
      row.append(name); tip.append(row);
    }
    cursor.style.left = 100 * place + "%";
    tip.style.left = place < 0.5 ? 100 * place + "%" : ""; tip.style.right = place < 0.5 ? "" : 100 - 100 * place + "%";
    tip.style.margin = "0 8px";
    plot.append(cursor, tip);
  };
  plot.addEventListener("pointermove", show); plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
const seconds = Number(document.body.dataset.refresh);
if (seconds) {
  const key = "surogate-" + document.body.dataset.run;
  try { scrollTo(0, Number(sessionStorage.getItem(key))); } catch {}
  setTimeout(() => { try { sessionStorage.setItem(key, scrollY); } catch {} location.reload(); }, 1000 * seconds);
}
