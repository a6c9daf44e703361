/** The page: what was asked for, who runs when, and what is said about it. */
import { ApiError, fetchModel, repeat, setKey, stream } from "./api.js";
import { Column, describePlan } from "./column.js";
import { EXAMPLES, HINTS } from "./examples.js";
import * as format from "./format.js";
import { hideSummary, showSummary } from "./summary.js";

const at = (id) => document.getElementById(id);
const LIVE_MS = 100;
const REPETITIONS = 2;

const full = new Column(at("columns"), "full", "The answer of every layer will stand here.");
const reduced = new Column(at("columns"), "reduced", "The answer of the schedule will stand here.");
let model = null;
let schedules = [];
let speedups = []; // of the schedules, as format.speedups says them
let running = null;
let typed = { completion: EXAMPLES.completion[0][1], chat: EXAMPLES.chat[0][1] };
let connected = false; // once: what the user has chosen stays

// ------------------------------------------------------------------ the server and its schedules

async function connect() {
  at("banner").hidden = true;
  try {
    model = await fetchModel();
  } catch (error) {
    showTrouble(error);
    return;
  }
  at("model").textContent = `${model.id} · ${model.num_layers} layers`;
  schedules = model.schedules
    .filter((schedule) => schedule.nominal_speedup > 1 || schedule.prompt_layers.length < model.num_layers)
    .sort((a, b) => a.nominal_speedup - b.nominal_speedup)
    .map((schedule) => ({ ...schedule, num_layers: model.num_layers }));
  const chosen = schedules.findIndex((schedule) => schedule.name === model.default_schedule);
  const slider = at("schedule");
  slider.max = Math.max(0, schedules.length - 1);
  slider.value = Math.max(0, chosen);
  speedups = format.speedups(schedules);
  const ticks = speedups.map(({ speedup, prompts }) => (prompts === null ? speedup : `${speedup}\nprompts\n${prompts}`));
  at("schedule-ticks").replaceChildren(...ticks.map((tick) => element("span", tick)));
  slider.hidden = at("schedule-ticks").hidden = schedules.length < 2;
  at("schedule-name").ariaHidden = schedules.length > 1; // the slider says it
  reduced.root.hidden = schedules.length === 0;
  at("legend-differs").hidden = schedules.length === 0;
  at("results").hidden = false;
  setRunning(false);
  if (!connected && model.chat && !(model.template?.used && !model.template.chat)) {
    document.querySelector("[name=kind][value=chat]").checked = true;
    showKind();
  }
  connected = true;
  showHint();
  showPlans();
}

const everyLayer = () => {
  const { num_layers: all } = model;
  const prompt_layers = Array.from({ length: all }, (_, layer) => layer);
  return { name: "full", nominal_speedup: 1, num_layers: all, drop_order: [], budgets: [all], prompt_layers };
};

const chosenSchedule = () => schedules[at("schedule").valueAsNumber];

function maxTokens() {
  const field = at("max-tokens");
  const value = Math.min(Number(field.max), Math.max(1, Math.round(field.valueAsNumber) || 48));
  field.value = value;
  return value;
}

/** Empties both columns and shows the plans in them. */
function showPlans() {
  if (!model || running) return;
  const columns = maxTokens();
  const schedule = chosenSchedule();
  full.reset(everyLayer(), "Full depth", columns);
  hideSummary();
  if (!schedule) {
    at("lead").textContent = `${describePlan(everyLayer())}: this server has no schedule.`;
    at("schedule-name").textContent = "none";
    at("schedule-plan").textContent =
      "This server has full depth only: its model was tuned under no schedule. “skipdecode plan” finds one, “skipdecode tune” " +
      "makes the model hold under it, and --schedule FILE offers it here.";
    return;
  }
  reduced.reset(schedule, schedule.name, columns);
  const nominal = `nominal ${format.times(schedule.nominal_speedup)}`;
  const { prompts } = speedups[schedules.indexOf(schedule)];
  const through = prompts === null ? "" : `, prompts through ${prompts} layers`;
  at("schedule-name").textContent = `${schedule.name}, ${nominal}${through}`;
  at("schedule").setAttribute("aria-valuetext", `${schedule.name}, nominal speed-up ${schedule.nominal_speedup.toFixed(2)}${through}`);
  const untuned = schedule.tuned === false ? " The model was not tuned under it: its text may fall apart." : "";
  const plan = `${describePlan(schedule)}; ${format.number(schedule.mean_budget, 1)} on average for new tokens.`;
  at("schedule-plan").textContent = plan + untuned;
  at("lead").textContent = `Every layer on the left. On the right ${schedule.name}: ${describePlan(schedule)}.`;
}

// ------------------------------------------------------------------ a run

async function run() {
  const prompt = at("prompt").value;
  at("prompt-problem").hidden = prompt.trim() !== "";
  at("prompt").toggleAttribute("aria-invalid", prompt.trim() === "");
  if (!prompt.trim()) {
    at("prompt").focus();
    return;
  }
  if (!model || running) return;
  showPlans();
  const together = at("together").checked;
  const request = { model: model.id, kind: kind(), prompt, maxTokens: maxTokens() };
  const columns = schedules.length ? [full, reduced] : [full];
  running = new AbortController();
  setRunning(true);
  const clock = setInterval(() => columns.forEach((column) => column.began !== null && column.show()), LIVE_MS);
  try {
    await runColumns(columns, request, together);
  } finally {
    clearInterval(clock);
    running = null;
    setRunning(false);
  }
}

async function runColumns(columns, request, together) {
  const { signal } = running;
  const outcomes = [];
  if (together) {
    say("Running both at the same time.");
    outcomes.push(...(await Promise.all(columns.map((column) => runColumn(column, request, signal)))));
  } else {
    columns.slice(1).forEach((column) => column.wait());
    for (const column of columns) {
      say(`Running ${column.title.textContent}.`);
      outcomes.push(await runColumn(column, request, signal));
      if (!outcomes.at(-1)) break;
    }
    columns.slice(outcomes.length).forEach((column) => column.setState("idle"));
  }
  if (signal.aborted) say("Stopped.");
  else if (!outcomes.every(Boolean)) say("");
  else if (columns.length === 2) await compareColumns(columns, request, together);
  else say(`Done: ${full.tokens.length} tokens.`);
}

/** Says what both answers show together; before that, if asked for, both are measured again. */
async function compareColumns(columns, request, together) {
  const shared = together ? ", sharing the machine" : "";
  const once = !at("again").checked;
  const said = showSummary(full, reduced, once ? `one run each${shared}` : "measuring again …");
  reveal(at("tiles"));
  if (once) {
    say(`Both are done. ${said}`);
    return;
  }
  say("Both are done. Measuring again.");
  const { signal } = running;
  let runs = 1;
  for (let again = true; again && runs <= REPETITIONS; runs += again) {
    const measured = [];
    if (together) measured.push(...(await Promise.all(columns.map((column) => measure(column, request, signal)))));
    else for (const column of columns) measured.push(await measure(column, request, signal));
    again = measured.every(Boolean);
  }
  say(showSummary(full, reduced, `fastest of ${runs} runs each${shared}`));
}

/** Repeats a column's answer without drawing it, and keeps the faster figures; true if it got to the end. */
async function measure(column, request, signal) {
  if (signal.aborted) return false;
  column.setState("measuring");
  try {
    column.improve(await repeat({ ...request, schedule: column.schedule.name }, signal));
    column.end("done");
    return true;
  } catch (error) {
    if (signal.aborted) column.end("done");
    else if (error instanceof ApiError) column.end("done", `Not measured again. ${error.message}`);
    else throw error;
    return false;
  }
}

/** Runs one column to its end; true if it got there. */
async function runColumn(column, request, signal) {
  column.start();
  reveal(column.root);
  try {
    for await (const { tokens, figures } of stream({ ...request, schedule: column.schedule.name }, signal)) {
      if (tokens) column.add(tokens);
      if (figures) column.finish(figures);
    }
    return true;
  } catch (error) {
    if (signal.aborted) column.end("stopped");
    else if (!(error instanceof ApiError)) throw error;
    else {
      column.end("failed", error.message);
      if (error.status === 401) openKey();
    }
    return false;
  }
}

function setRunning(on) {
  const [from, to] = on ? [at("run"), at("stop")] : [at("stop"), at("run")];
  const moveFocus = document.activeElement === from;
  at("stop").hidden = !on;
  at("run").disabled = on;
  at("run").textContent = on ? "Running …" : schedules.length ? "Run both" : "Run";
  for (const id of ["max-tokens", "together", "again"]) at(id).disabled = on;
  at("schedule").disabled = on || schedules.length < 2;
  if (moveFocus) to.focus({ preventScroll: true });
}

/** Scrolls as far as needed to see all of an element. */
function reveal(shown) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  shown.scrollIntoView({ block: "nearest", behavior: still ? "auto" : "smooth" });
}

// ------------------------------------------------------------------ words

const say = (text) => (at("status").textContent = text);

function showTrouble(error) {
  if (!(error instanceof ApiError)) throw error;
  at("model").textContent = "Not connected";
  at("banner-text").textContent = error.message;
  at("banner").hidden = false;
  if (error.status === 401) openKey();
}

function openKey() {
  at("key-form").hidden = false;
  at("key-open").setAttribute("aria-expanded", "true");
  at("key").focus();
}

function element(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

// ------------------------------------------------------------------ the form

const kind = () => new FormData(at("composer")).get("kind");

function showHint() {
  const template = kind() === "completion" && model?.template?.used ? model.template.prompt : null;
  at("prompt-hint").textContent = template ? `Put into the template that this model was tuned on: ${JSON.stringify(template)}.` : HINTS[kind()];
}

function showKind() {
  at("prompt").value = typed[kind()];
  at("prompt").placeholder = kind() === "chat" ? "Ask something" : "Text to go on from";
  showHint();
  const chips = EXAMPLES[kind()].map(([name, text]) => {
    const chip = element("button", name);
    chip.type = "button";
    chip.className = "chip";
    chip.addEventListener("click", () => {
      at("prompt").value = typed[kind()] = text;
      at("prompt-problem").hidden = true;
    });
    return chip;
  });
  at("examples").replaceChildren(...chips);
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("prompt").addEventListener("input", () => (typed[kind()] = at("prompt").value));
document.querySelectorAll("[name=kind]").forEach((radio) => radio.addEventListener("change", showKind));
at("schedule").addEventListener("input", showPlans);
at("max-tokens").addEventListener("change", showPlans);
at("stop").addEventListener("click", () => running?.abort());
at("reload").addEventListener("click", connect);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("composer").requestSubmit();
  if (event.key === "Escape") running?.abort();
});
at("key-open").addEventListener("click", () => {
  const open = at("key-form").hidden;
  at("key-form").hidden = !open;
  at("key-open").setAttribute("aria-expanded", String(open));
  if (open) at("key").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  at("key-form").hidden = true;
  at("key-open").setAttribute("aria-expanded", "false");
  at("run").focus();
  connect();
});

showKind();
connect();
