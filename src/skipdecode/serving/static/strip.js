/** The picture of a run: a column for each token, a row for each layer, the lowest layer at the bottom. */

const SVG = "http://www.w3.org/2000/svg";

/** The layers that run at a depth, ascending: all but the first ones of the drop order. */
export function layersAt(schedule, depth) {
  const dropped = new Set(schedule.drop_order.slice(0, schedule.num_layers - depth));
  return Array.from({ length: schedule.num_layers }, (_, layer) => layer).filter((layer) => !dropped.has(layer));
}

/** The layers of the first token, which is predicted from the prompt: the prompt's, and those of the next token. */
function firstLayers(schedule) {
  const layers = new Set([...schedule.prompt_layers, ...layersAt(schedule, schedule.budgets[0])]);
  return [...layers].sort((a, b) => a - b);
}

/** Number of layers that the schedule plans for the token at `index`. */
export function plannedDepth(schedule, index) {
  const { budgets } = schedule;
  return index === 0 ? firstLayers(schedule).length : budgets[Math.min(index - 1, budgets.length - 1)];
}

export class Strip {
  /** `onPoint(index)` is called with the column under the pointer, and with null when it leaves. */
  constructor(svg, onPoint) {
    this.svg = svg;
    this.columns = 0;
    this.depths = [];
    this.plan = svg.appendChild(document.createElementNS(SVG, "g"));
    this.ran = svg.appendChild(document.createElementNS(SVG, "g"));
    this.cursor = svg.appendChild(document.createElementNS(SVG, "rect"));
    this.cursor.classList.add("cursor");
    new ResizeObserver(() => this.draw()).observe(svg);
    svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      onPoint(Math.floor((x * this.columns) / svg.clientWidth));
    });
    svg.addEventListener("pointerleave", () => onPoint(null));
  }

  /** Shows what a schedule plans for `columns` tokens, and no run yet. */
  reset(schedule, columns) {
    this.schedule = schedule;
    this.columns = columns;
    this.depths = [];
    this.point(null);
    this.draw();
  }

  add(depth) {
    this.depths.push(depth);
    this.columns = Math.max(this.columns, this.depths.length);
    this.ran.append(this.column("ran", this.depths.length - 1, depth));
  }

  /** Rings a column; null takes the ring away. */
  point(index) {
    this.pointed = index;
    this.cursor.toggleAttribute("hidden", index === null);
    if (index === null) return;
    const [left, right] = this.edges(index);
    set(this.cursor, { x: left - 0.5, y: 0.5, width: Math.max(right - left, 3), height: this.svg.clientHeight - 1 });
  }

  draw() {
    if (!this.schedule || !this.svg.clientWidth) return;
    set(this.svg, { viewBox: `0 0 ${this.svg.clientWidth} ${this.svg.clientHeight}` });
    const planned = Array.from({ length: this.columns }, (_, i) => plannedDepth(this.schedule, i));
    this.plan.replaceChildren(...planned.map((depth, i) => this.column("planned", i, depth)));
    this.ran.replaceChildren(...this.depths.map((depth, i) => this.column("ran", i, depth)));
    this.point(this.pointed);
  }

  column(kind, index, depth) {
    const path = document.createElementNS(SVG, "path");
    set(path, { d: this.cells(index, depth), class: kind, "data-position": index, "data-layers": depth });
    path.style.setProperty("--depth", depth / this.schedule.num_layers);
    return path;
  }

  /** Path of the layers that run at `depth`, in column `index`. Edges are whole pixels, so that gaps look alike. */
  cells(index, depth) {
    const [left, right] = this.edges(index);
    const all = this.schedule.num_layers;
    const row = (layer) => Math.round((this.svg.clientHeight * (all - layer)) / all);
    const layers = index === 0 ? firstLayers(this.schedule) : layersAt(this.schedule, depth);
    return layers
      .map((layer) => `M${left} ${row(layer + 1)}H${right}V${row(layer) - 1}H${left}Z`)
      .join("");
  }

  edges(index) {
    const width = this.svg.clientWidth / this.columns;
    return [Math.round(index * width), Math.round((index + 1) * width) - (width >= 4 ? 1 : 0)];
  }
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}
