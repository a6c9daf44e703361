/** One answer: its figures, its tinted text, its picture, and the token being looked at. */
import * as format from "./format.js";
import { Strip } from "./strip.js";

const STATES = {
  idle: "Ready",
  waiting: "Next",
  reading: "Reading the prompt",
  writing: "Writing",
  measuring: "Measuring",
  done: "Done",
  stopped: "Stopped",
  failed: "Failed",
};

export class Column {
  /** `id` makes the element ids; `emptyText` stands where the answer will. */
  constructor(parent, id, emptyText) {
    this.root = document.getElementById("column-template").content.firstElementChild.cloneNode(true);
    parent.append(this.root);
    const part = (selector) => this.root.querySelector(selector);
    Object.assign(this, { title: part("h3"), planText: part(".plan"), stateText: part(".state") });
    Object.assign(this, { problem: part(".problem"), empty: part(".empty"), tokensBox: part(".tokens") });
    Object.assign(this, { tip: part(".tip"), readout: part(".readout"), scrub: part(".scrub") });
    this.axisTop = part(".axis-top");
    this.svg = part("svg");
    this.root.id = id;
    this.title.id = `${id}-title`;
    this.root.setAttribute("aria-labelledby", this.title.id);
    this.emptyText = emptyText;
    this.strip = new Strip(this.svg, (index) => this.look(index));
    this.scrub.addEventListener("input", () => this.look(Math.min(this.scrub.valueAsNumber, this.tokens.length - 1)));
    this.scrub.addEventListener("focus", () => this.look(Math.min(this.scrub.valueAsNumber, this.tokens.length - 1)));
    this.scrub.addEventListener("blur", () => this.look(null));
    this.tokensBox.addEventListener("pointerover", (event) => {
      const span = event.target.closest(".token");
      this.look(span ? this.spans.indexOf(span) : null);
    });
    this.tokensBox.addEventListener("pointerleave", () => this.look(null));
  }

  /** Forgets the last answer and shows what `schedule` plans for at most `columns` tokens. */
  reset(schedule, title, columns) {
    Object.assign(this, { schedule, tokens: [], spans: [], figures: null, began: null, firstAt: null });
    this.title.textContent = title;
    this.planText.textContent = describePlan(schedule);
    this.tokensBox.replaceChildren();
    this.empty.textContent = this.emptyText;
    this.empty.hidden = false;
    this.problem.hidden = true;
    this.axisTop.textContent = schedule.num_layers - 1;
    this.strip.reset(schedule, columns);
    this.scrub.max = columns - 1;
    this.scrub.value = 0;
    this.scrub.disabled = true;
    this.scrub.setAttribute("aria-label", `Look at one token of ${title}`);
    this.look(null);
    this.setState("idle");
    this.show();
  }

  wait() {
    this.setState("waiting");
  }

  start() {
    this.began = performance.now();
    this.setState("reading");
  }

  /**
   * Takes tokens as the API gives them: { id, text, position, layers }. They are drawn by the next `show`: where browser
   * and server share a machine, a picture for every token would take the model's time.
   */
  add(tokens) {
    this.tokens.push(...tokens);
    if (this.firstAt !== null) return;
    this.firstAt = performance.now();
    this.empty.hidden = true;
    this.scrub.disabled = false;
    this.setState("writing");
    this.show();
  }

  draw(token) {
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = token.text;
    span.style.setProperty("--depth", token.layers / this.schedule.num_layers);
    this.spans.push(span);
    this.tokensBox.append(span);
    this.strip.add(token.layers);
  }

  finish(figures) {
    this.figures = figures;
    this.end("done");
  }

  /** Takes the figures of a repetition if it was faster. */
  improve(figures) {
    if (figures.tokens_per_s > this.figures.tokens_per_s) this.figures = figures;
    this.show();
  }

  /** Ends without the server's figures: "stopped", or "failed" with a message. */
  end(state, message = "") {
    this.problem.textContent = message;
    this.problem.hidden = !message;
    const ended = state === "done" && !this.text.trim();
    this.empty.textContent = ended ? "No text: the model ended its answer at once." : this.emptyText;
    this.empty.hidden = (this.tokens.length > 0 && !ended) || state === "failed";
    if (!this.tokens.length) this.began = null; // nothing came: no time to show
    this.setState(state);
    this.show();
    this.began = null;
  }

  /** Draws new tokens and the figures of this moment: the server's once they are there, till then by the page's clock. */
  show() {
    this.tokens.slice(this.spans.length).forEach((token) => this.draw(token));
    const now = performance.now();
    const count = this.tokens.length;
    const ran = this.tokens.reduce((sum, token) => sum + token.layers, 0);
    const final = this.figures;
    const decode = count > 1 ? (count - 1) / ((now - this.firstAt) / 1000) : null;
    const time = final ? final.first_token_s + final.decode_s : this.began && (now - this.began) / 1000;
    const share = final ? final.layers_run / final.layers_full : ran / (count * this.schedule.num_layers);
    const values = {
      rate: final ? final.tokens_per_s : decode,
      time,
      tokens: count || null,
      layers: count ? share : null,
    };
    const shapes = { rate: format.rate, time: format.seconds, tokens: format.number, layers: format.percent };
    for (const [name, shape] of Object.entries(shapes)) {
      const text = values[name] === null ? "" : shape(values[name]);
      this.root.querySelector(`[data-figure=${name}]`).textContent = text;
    }
    this.svg.setAttribute("aria-label", this.describe(ran));
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Marks the tokens that overlap the given ranges of characters, [{ start, end }]. */
  mark(ranges) {
    let start = 0;
    this.tokens.forEach((token, i) => {
      const end = start + token.text.length;
      const differs = ranges.some((range) => range.start < end && range.end > start);
      this.spans[i].classList.toggle("differs", differs);
      start = end;
    });
  }

  /** Looks at the token at `index`, in the text and in the picture; null looks at none. */
  look(index) {
    const at = index !== null && index >= 0 && index < this.spans.length ? index : null;
    this.spans.forEach((span, i) => span.classList.toggle("looked", i === at));
    this.strip.point(at);
    this.tip.hidden = at === null;
    this.readout.textContent = "";
    if (at === null) return;
    const token = this.tokens[at];
    const layers = `${token.layers} of ${this.schedule.num_layers} layers`;
    this.readout.textContent = `token ${at + 1}: “${format.visible(token.text)}”, ${layers}`;
    this.scrub.value = at;
    this.scrub.setAttribute("aria-valuetext", `Token ${at + 1} of ${this.tokens.length}: ${token.text}. ${layers}`);
    this.tip.textContent = layers;
    const [box, frame] = [this.spans[at].getBoundingClientRect(), this.tip.parentElement.getBoundingClientRect()];
    const room = frame.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, box.left - frame.left))}px`;
    this.tip.style.top = `${box.top - frame.top - this.tip.offsetHeight - 4}px`;
  }

  setState(state) {
    this.stateText.dataset.state = state;
    this.stateText.textContent = STATES[state];
    this.tokensBox.setAttribute("aria-busy", state === "reading" || state === "writing");
  }

  describe(ran) {
    const { num_layers: all } = this.schedule;
    if (!this.tokens.length) return `Planned layers for each token. ${describePlan(this.schedule)}.`;
    const depths = this.tokens.map((token) => token.layers);
    const full = this.tokens.length * all;
    return `Layers run for each of ${depths.length} tokens: from ${Math.max(...depths)} to ${Math.min(...depths)} of ${all}, ${ran} of ${full} in all.`;
  }
}

/** A schedule in one line of text. */
export function describePlan(schedule) {
  const { budgets, num_layers: all, prompt_layers: prompt } = schedule;
  const [most, least] = [budgets[0], budgets[budgets.length - 1]];
  const isShort = prompt.length < all;
  const tokens = isShort ? "new token" : "token";
  const prompts = isShort ? `; ${prompt.length} for prompts` : "";
  if (least === all) return `All ${all} layers for every ${tokens}${prompts}`;
  if (most === least) return `${most} of ${all} layers for every ${tokens}${prompts}`;
  return `${most} down to ${least} of ${all} layers, over ${budgets.length} ${tokens}s${prompts}`;
}
