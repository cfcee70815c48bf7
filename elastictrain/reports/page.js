// Tells the values under the pointer, or under the cursor that the arrow keys move. Everything else works without a script.
"use strict";
for (const [index, chart] of JSON.parse(document.getElementById("data").textContent).entries()) {
  const svg = document.querySelectorAll("svg.chart")[index];
  const cursor = svg.querySelector(".cursor");
  const readout = svg.parentElement.querySelector(".readout");
  const places = [...new Set(chart.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  const number = (value) => String(Number(value.toPrecision(5)));
  let at = -1;
  const show = (place) => {
    at = place;
    const x = places[place];
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    readout.textContent = chart.series.map((one) => {
      const i = nearest(one.x, x);
      const some = one.n && one.n[i] > 1 ? ` (${number(one.low[i])} to ${number(one.high[i])}, ${one.n[i]} values)` : "";
      return `${one.name} at step ${Math.round(one.step[i])}: ${number(one.mean[i])}${some}`;
    }).join("  ·  ");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    show(nearest(places, (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(places.length - 1, at < 0 ? (step > 0 ? 0 : places.length - 1) : at + step)));
  });
}
