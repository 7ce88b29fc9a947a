"use strict";
// Draws the charts of a page from the JSON in it, with Vega-Lite. Text from runs goes through textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { axis: data.axis, log: false, smooth: 0 };
  const drawn = new Map(); // figure -> what is drawn in it

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = () => data.config.range.category.map(style); // named as in page.css
  const scaled = (value) => {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + unit;
    }
    return String(+value.toPrecision(6));
  };
  const small = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1e4) return scaled(value);
    return size !== 0 && size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(+value.toPrecision(size >= 1 ? 5 : 4));
  };
  const clock = (milliseconds) => {
    const seconds = milliseconds / 1000;
    if (seconds < 60) return +seconds.toFixed(1) + " s";
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") + " h";
  };
  const shown = (axis, x) => axis + " " + (axis === "time" ? clock(x) : scaled(x));

  // An exponential mean that is not drawn towards its first value; gaps stay gaps.
  function smoothed(values, weight) {
    let sum = 0, share = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  }

  // What the machine does is measured by the clock: such charts have no tokens, and keep the axis of time.
  const axisOf = (chart) => chart.lines.some((line) => line[state.axis].some((x) => x != null)) ? state.axis : "time";

  // The lines of a chart as they are drawn: numbers x and y (null is a gap), and the ys before smoothing.
  function linesOf(chart, axis) {
    const unit = axis === "time" ? 1000 : 1;
    return chart.lines.map((line, number) => {
      const known = line[axis].map((_, place) => place).filter((place) => line[axis][place] != null);
      const raw = known.map((place) => (state.log && line.value[place] <= 0 ? null : line.value[place]));
      const colour = (data.compares ? line.run : number) % data.config.range.category.length;
      return { x: known.map((place) => unit * line[axis][place]), y: smoothed(raw, state.smooth), raw, colour };
    });
  }

  // Rows for Vega: of the lines that are not hidden, from a point before the zoom to one after it.
  function rowsOf(lines, hidden, zoom) {
    return lines.flatMap((line, number) => {
      if (hidden.has(number)) return [];
      const places = line.x.map((_, place) => place).filter((place) =>
        !zoom || (line.x[Math.min(place + 1, line.x.length - 1)] >= zoom[0] && line.x[Math.max(place - 1, 0)] <= zoom[1]));
      const few = line.x.length < data.marked, inside = (x) => !zoom || (zoom[0] <= x && x <= zoom[1]);
      const row = (place, y, faint) =>
        ({ x: line.x[place], y, line: number, colour: line.colour, faint, dot: few && !faint && inside(line.x[place]) });
      const clear = places.map((place) => row(place, line.y[place], false));
      return state.smooth ? [...places.map((place) => row(place, line.raw[place], true)), ...clear] : clear;
    });
  }

  async function draw(figure) {
    const chart = data.charts[+figure.dataset.chart], axis = axisOf(chart);
    const old = drawn.get(figure) || { hidden: new Set(), zoom: null };
    if (old.made) old.made.finalize();
    const one = { chart, axis, width: widthOf(figure), hidden: old.hidden, zoom: old.axis === axis ? old.zoom : null, lines: linesOf(chart, axis) };
    drawn.set(figure, one);
    const spec = structuredClone(data.specs[axis][state.log ? "log" : "linear"]);
    const ends = one.lines.flatMap((line) => line.x.length ? [line.x[0], line.x.at(-1)] : []);
    one.domain = one.zoom || [Math.min(...ends), Math.max(...ends)];
    spec.params = [{ name: "reach", value: one.domain }];
    spec.encoding.x.scale.domain = { expr: "reach" };
    spec.data.values = rowsOf(one.lines, one.hidden, one.zoom);
    Object.assign(spec, { width: one.width, height: 240, autosize: { type: "fit", contains: "padding" }, padding: 2 });
    const look = structuredClone(data.config);
    look.axis.labelColor = style(look.axis.labelColor);
    look.axis.gridColor = style(look.axis.gridColor);
    look.range.category = colours();
    look.font = getComputedStyle(document.body).fontFamily;
    // `ast`: expressions are interpreted and never compiled, as the page's policy demands.
    const options = { mode: "vega-lite", ast: true, actions: false, defaultStyle: false, tooltip: false, hover: false, renderer: "svg" };
    const made = await vegaEmbed(figure.querySelector(".drawing"), spec, { ...options, config: look });
    if (drawn.get(figure) !== one) return made.finalize(); // drawn once more meanwhile
    one.made = made;
    const rows = made.view.data(data.rows).filter((row) => !row.faint);
    figure.dataset.points = rows.filter((row) => row.y != null).length;
    figure.dataset.gaps = rows.filter((row) => row.y == null).length;
    figure.dataset.axis = axis;
    figure.dataset.reach = Math.max(...rows.map((row) => row.x)) / (axis === "time" ? 1000 : 1);
    list(figure, one);
    told(figure, one, null);
  }

  const widthOf = (figure) => Math.max(160, figure.querySelector(".plot").clientWidth);

  // The names of the lines, to be clicked, with their colours and values.
  function list(figure, one) {
    const colour = colours();
    figure.querySelector(".legend").replaceChildren(...one.lines.map((line, number) => {
      const button = document.createElement("button"), swatch = document.createElement("i"), value = document.createElement("b");
      button.type = "button";
      button.title = data.runs[one.chart.lines[number].run] || "";
      button.setAttribute("aria-pressed", String(!one.hidden.has(number)));
      swatch.style.background = colour[line.colour];
      value.className = "value";
      button.append(swatch, one.chart.lines[number].label, value);
      button.addEventListener("click", () => {
        one.hidden.has(number) ? one.hidden.delete(number) : one.hidden.add(number);
        button.setAttribute("aria-pressed", String(!one.hidden.has(number)));
        draw(figure);
      });
      return button;
    }));
    figure.querySelector(".spots").replaceChildren(...one.lines.map((line) => {
      const spot = document.createElement("i");
      spot.style.background = colour[line.colour];
      return spot;
    }));
  }

  // The place in a line of the point at or before x, -1 where there is none.
  function placeOf(line, x) {
    let from = 0, to = line.x.length;
    while (from < to) {
      const middle = (from + to) >> 1;
      line.x[middle] <= x ? from = middle + 1 : to = middle;
    }
    return from - 1;
  }

  // The values at x in the legend, a rule and dots where they are; the last values where x is null.
  function told(figure, one, x) {
    const inside = x != null && x >= one.domain[0] && x <= one.domain[1];
    const values = figure.querySelectorAll(".value"), spots = figure.querySelectorAll(".spots i");
    const rule = figure.querySelector(".rule"), [left, top] = one.made.view.origin();
    const across = one.made.view.scale("x"), down = one.made.view.scale("y");
    figure.querySelector(".where").textContent = inside ? shown(one.axis, x) : "";
    rule.hidden = !inside;
    if (inside) Object.assign(rule.style, { left: left + across(x) + "px", top: top + "px", height: down.range()[0] + "px" });
    one.lines.forEach((line, number) => {
      let place = inside ? placeOf(line, x) : line.x.length - 1;
      if (!inside) while (place > 0 && line.y[place] == null) place -= 1;
      const y = line.y[place];
      values[number].textContent = small(y);
      spots[number].hidden = !inside || y == null || one.hidden.has(number) || line.x[place] < one.domain[0];
      if (!spots[number].hidden) {
        Object.assign(spots[number].style, { left: left + across(line.x[place]) + "px", top: top + down(y) + "px" });
      }
    });
  }

  // The value of x under the pointer, within the axis.
  function under(figure, one, event) {
    const scale = one.made.view.scale("x"), [from, to] = scale.range();
    const pixel = event.clientX - figure.querySelector(".plot").getBoundingClientRect().left - one.made.view.origin()[0];
    return +scale.invert(Math.min(to, Math.max(from, pixel)));
  }

  // The point of the lines on view that is nearest to x, so that what is told is what was measured.
  function nearest(one, x) {
    const near = one.lines.filter((_, number) => !one.hidden.has(number)).flatMap((line) => {
      const place = placeOf(line, x);
      return [line.x[place], line.x[place + 1]].filter((at) => at >= one.domain[0] && at <= one.domain[1]);
    });
    return near.length ? near.reduce((best, at) => (Math.abs(at - x) < Math.abs(best - x) ? at : best)) : null;
  }

  // The pointer moves over one chart, and the rule over all of the same axis.
  const everywhere = (axis, x) => drawn.forEach((one, figure) => {
    if (one.made && (one.axis === axis || x == null)) told(figure, one, x);
  });

  function watch(figure) {
    const plot = figure.querySelector(".plot"), brush = figure.querySelector(".brush");
    let begun = null; // x where a drag began
    const span = (event) => [begun, under(figure, drawn.get(figure), event)].sort((a, b) => a - b);
    plot.addEventListener("pointermove", (event) => {
      const one = drawn.get(figure);
      if (!one || !one.made) return;
      everywhere(one.axis, nearest(one, under(figure, one, event)));
      if (begun == null) return;
      const scale = one.made.view.scale("x"), [left, top] = one.made.view.origin(), [from, to] = span(event).map(scale);
      const box = { left: left + from, width: to - from, top, height: one.made.view.scale("y").range()[0] };
      for (const [side, pixels] of Object.entries(box)) brush.style[side] = pixels + "px";
      brush.hidden = false;
    });
    plot.addEventListener("pointerleave", () => everywhere(null, null));
    plot.addEventListener("pointerdown", (event) => {
      const one = drawn.get(figure);
      if (event.pointerType === "touch" || event.button || !one || !one.made) return; // a finger scrolls
      begun = under(figure, one, event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      if (begun == null) return;
      const one = drawn.get(figure), [from, to] = span(event), scale = one.made.view.scale("x");
      begun = null;
      brush.hidden = true;
      if (scale(to) - scale(from) < 5) return; // a click
      one.zoom = [from, to];
      draw(figure);
    });
    plot.addEventListener("dblclick", () => {
      const one = drawn.get(figure);
      if (!one || !one.zoom) return;
      one.zoom = null;
      draw(figure);
    });
  }

  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const seen = (figure) => figure.closest("details") === null || figure.closest("details").open;
  const inWindow = (figure) => {
    const box = figure.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  };

  // All charts one after the other, those in the window first; a page of many stays at hand meanwhile. A later turn ends this one.
  let turn = 0;
  async function redraw() {
    const mine = turn += 1, root = document.documentElement.dataset, now = figures.filter(seen);
    delete root.drawn;
    for (const figure of [...now.filter(inWindow), ...now.filter((one) => !inWindow(one))]) {
      await draw(figure);
      await new Promise((resume) => setTimeout(resume));
      if (mine !== turn) return;
    }
    root.drawn = String(now.length);
    root.milliseconds ||= String(Math.round(performance.now())); // from the page's beginning to its last chart
  }

  figures.forEach(watch);
  document.querySelectorAll("input[name=axis]").forEach((input) => {
    input.checked = input.value === state.axis;
    input.addEventListener("change", () => { state.axis = input.value; redraw(); });
  });
  const wire = (id, read) => {
    const input = document.getElementById(id);
    if (input) input.addEventListener("input", () => { read(input); redraw(); });
  };
  wire("log", (input) => { state.log = input.checked; });
  wire("smooth", (input) => { state.smooth = +input.value; });
  document.querySelectorAll("details").forEach((element) => element.addEventListener("toggle", () => {
    if (element.open) figures.filter((figure) => element.contains(figure) && seen(figure) && !drawn.has(figure)).forEach(draw);
  }));
  dark.addEventListener("change", redraw);
  redraw();
  new ResizeObserver(() => drawn.forEach(async (one, figure) => {
    const width = widthOf(figure);
    if (!one.made || !seen(figure) || width === one.width) return;
    one.width = width;
    await one.made.view.width(width).runAsync();
    told(figure, one, null);
  })).observe(document.body);
})();
