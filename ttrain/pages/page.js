"use strict";
// Draws the charts of a page from the JSON in it. Text from runs goes through textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { axis: data.axis, log: false, smooth: 0 };
  const drawn = new Map(); // element of a chart -> its uPlot

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
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
  const clock = (seconds) => {
    if (seconds < 60) return +seconds.toFixed(1) + " s";
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") + " h";
  };
  const AXES = {
    step: { label: "step", show: scaled },
    tokens: { label: "tokens", show: scaled },
    time: { label: "time", show: clock },
  };

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

  function tables(chart) {
    return chart.lines.map((line) => {
      const at = line[axisOf(chart)];
      const known = at.map((x, place) => place).filter((place) => at[place] != null);
      let before = -Infinity; // an axis of time can stand still; uPlot wants x that grow
      const x = known.map((place) => (before = Math.max(before + 1e-6, at[place])));
      const y = known.map((place) => (state.log && line.value[place] <= 0 ? null : line.value[place]));
      return state.smooth ? [x, smoothed(y, state.smooth), y] : [x, y];
    });
  }

  function draw(figure) {
    const chart = data.charts[+figure.dataset.chart];
    const old = drawn.get(figure);
    const hidden = old ? old.hidden : new Set();
    if (old) old.plot.destroy();
    const place = figure.querySelector(".plot"), legend = figure.querySelector(".legend");
    const color = (line, number) => style(`--run${(data.compares ? line.run : number) % 8}`); // as .run0 ... in page.css
    const axis = AXES[axisOf(chart)], ink = style("--faint"), grid = { stroke: style("--grid"), width: 1 };
    const series = [{}], owners = [null];
    chart.lines.forEach((line, number) => {
      const sparse = line.value.length < 60;
      const one = { stroke: color(line, number), width: 2, show: !hidden.has(number), points: { show: sparse, size: 5 } };
      const raw = { ...one, alpha: 0.25, width: 1, points: { show: false } };
      series.push(one); owners.push(number);
      if (state.smooth) { series.push(raw); owners.push(number); }
    });
    const plot = new uPlot({
      width: Math.max(160, place.clientWidth), height: 240, series,
      legend: { show: false },
      cursor: { sync: { key: axis.label, setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: { distr: state.log ? 3 : 1 } },
      axes: [
        { stroke: ink, grid, ticks: grid, size: 34, values: (_, ticks) => ticks.map(axis.show) },
        { stroke: ink, grid, ticks: grid, size: 58, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : small(tick)) },
      ],
      hooks: { setCursor: [(u) => told(u, legend, u.cursor.idx)] },
    }, uPlot.join(tables(chart)), place);
    drawn.set(figure, { plot, hidden });
    plot.owners = owners; plot.chart = chart; plot.axisOf = axis;
    legend.replaceChildren(...chart.lines.map((line, number) => {
      const button = document.createElement("button"), swatch = document.createElement("i"), value = document.createElement("b");
      button.type = "button";
      button.title = data.runs[line.run] || "";
      button.setAttribute("aria-pressed", String(!hidden.has(number)));
      swatch.style.background = color(line, number);
      value.className = "value";
      button.append(swatch, line.label, value);
      button.addEventListener("click", () => {
        hidden.has(number) ? hidden.delete(number) : hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        owners.forEach((owner, at) => owner === number && plot.setSeries(at, { show: !hidden.has(number) }));
      });
      return button;
    }));
    told(plot, legend, null);
    const shown = chart.lines.flatMap((line, number) => plot.data[owners.indexOf(number)]); // where undefined: not its x
    figure.dataset.points = shown.filter((value) => value != null).length;
    figure.dataset.gaps = shown.filter((value) => value === null).length;
    figure.dataset.axis = axis.label;
    figure.dataset.reach = plot.data[0].at(-1);
  }

  // The values under the cursor, else the last ones, in the legend.
  function told(plot, legend, at) {
    const where = legend.parentElement.querySelector(".where");
    const x = at == null ? null : plot.data[0][at];
    where.textContent = x == null ? "" : plot.axisOf.label + " " + plot.axisOf.show(x);
    legend.querySelectorAll(".value").forEach((element, number) => {
      const values = plot.data[plot.owners.indexOf(number)];
      let from = at == null ? values.length - 1 : at;
      while (from > 0 && values[from] === undefined) from -= 1; // the nearest point to the left: lines have their own steps
      if (at == null) while (from > 0 && values[from] == null) from -= 1;
      element.textContent = small(values[from]);
    });
  }

  function touched(plot, event) {
    const box = plot.over.getBoundingClientRect(), finger = event.touches[0];
    plot.setCursor({ left: finger.clientX - box.left, top: finger.clientY - box.top });
  }

  const seen = (figure) => figure.closest("details") === null || figure.closest("details").open;
  const redraw = () => document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    if (seen(figure)) draw(figure);
  });

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
    if (element.open) element.querySelectorAll("figure[data-chart]").forEach((figure) => drawn.has(figure) || draw(figure));
  }));
  dark.addEventListener("change", redraw);
  redraw();
  new ResizeObserver(() => drawn.forEach(({ plot }, figure) => {
    const width = figure.querySelector(".plot").clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: 240 });
  })).observe(document.body);
  document.addEventListener("touchmove", (event) => drawn.forEach(({ plot }) => {
    if (plot.over.contains(event.target)) touched(plot, event);
  }), { passive: true });
  document.documentElement.dataset.drawn = String(drawn.size);
})();
