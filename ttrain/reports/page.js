"use strict";
// The charts are drawn already: this shows the values under the pointer, hides lines, and smooths them.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => {
    const { axis, lines } = charts[+figure.dataset.chart];
    const ends = lines.flatMap(([x]) => (x ? [x[0], x.at(-1)] : []));
    const rule = document.createElementNS("http://www.w3.org/2000/svg", "path"), frame = figure.querySelector("path.background");
    const buttons = [...figure.querySelectorAll(".legend button")], values = buttons.map((button) => button.querySelector(".value"));
    rule.setAttribute("class", "rule");
    frame.parentNode.append(rule);
    return { figure, axis, lines, rule, frame, buttons, values, domain: [Math.min(...ends), Math.max(...ends)], last: values.map((value) => value.textContent) };
  });

  const scaled = (x) => {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (x >= size) return +(x / size).toPrecision(4) + unit;
    return String(x);
  };
  const clock = (milliseconds) => {
    const seconds = milliseconds / 1000, minutes = Math.round(seconds / 60);
    if (seconds < 60) return +seconds.toFixed(1) + " s";
    return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") + " h";
  };

  // The values of all lines at x, the last ones where x is null.
  function show(one, x) {
    const inside = x != null && x >= one.domain[0] && x <= one.domain[1];
    one.figure.querySelector(".where").textContent = inside ? one.axis + " " + (one.axis === "time" ? clock(x) : scaled(x)) : "";
    one.rule.toggleAttribute("hidden", !inside);
    if (inside) {
      const box = one.frame.getBBox(), left = (x - one.domain[0]) / (one.domain[1] - one.domain[0] || 1) * box.width;
      one.rule.setAttribute("d", `M${left},0v${box.height}`);
    }
    one.lines.forEach(([xs = [], ys = []], number) => {
      const value = ys[xs.findLastIndex((at) => at <= x)];
      one.values[number].textContent = !inside ? one.last[number] : value == null ? "–" : String(+value.toPrecision(5));
    });
  }

  // The measured point of the lines on view that is nearest to the pointer.
  function nearest(one, event) {
    const box = one.frame.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const x = one.domain[0] + share * (one.domain[1] - one.domain[0]);
    const shown = one.lines.filter((_, number) => one.buttons[number].getAttribute("aria-pressed") === "true");
    return shown.flatMap(([xs = []]) => xs).reduce((best, at) => (best == null || Math.abs(at - x) < Math.abs(best - x) ? at : best), null);
  }

  // An exponential mean that is not drawn towards its first value; gaps stay gaps. In pixels it is that of the values.
  function smoothed(path, weight) {
    let sum = 0, share = 0;
    return path.replace(/(-?[\d.]+),(-?[\d.]+)/g, (_, x, y) => {
      sum = weight * sum + (1 - weight) * y;
      share = weight * share + (1 - weight);
      return `${x},${+(sum / share).toFixed(3)}`;
    });
  }

  // The pointer moves over one chart, and the rule over all of the same axis.
  const showAll = (axis, x) => figures.forEach((one) => { if (x == null || one.axis === axis) show(one, x); });
  for (const one of figures) {
    const drawing = one.figure.querySelector("svg");
    drawing.addEventListener("pointermove", (event) => showAll(one.axis, nearest(one, event)));
    drawing.addEventListener("pointerleave", () => showAll(null, null));
    one.buttons.forEach((button, number) => button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      one.figure.querySelectorAll(`[aria-label="${number}"]`).forEach((mark) => mark.toggleAttribute("hidden", !shown));
    }));
  }
  const lines = [...document.querySelectorAll("figure[data-chart] .mark-line path")].map((path) => [path, path.getAttribute("d")]);
  document.getElementById("smooth")?.addEventListener("input", ({ target }) => {
    document.body.classList.toggle("smooth", target.value > 0);
    lines.forEach(([path, measured]) => path.setAttribute("d", target.value > 0 ? smoothed(measured, +target.value) : measured));
  });
})();
