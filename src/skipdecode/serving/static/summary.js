/** What two finished answers say together: speed-up, layers, cache, words. */
import { compare } from "./diff.js";
import * as format from "./format.js";

const at = (id) => document.getElementById(id);

export function hideSummary() {
  at("tiles").hidden = true;
  at("differences").hidden = true;
}

/** Fills the tiles and marks the differences. Returns one sentence for screen readers. */
export function showSummary(full, reduced, remark) {
  const { figures } = reduced;
  const words = compare(full.text, reduced.text);
  const kvFull = figures.kv_bytes + figures.kv_bytes_saved;
  const speed = showSpeed(full, reduced, remark);
  at("layers").textContent = format.percent(figures.layers_run / figures.layers_full);
  at("layers-note").textContent = `${format.number(figures.layers_run)} of ${format.number(figures.layers_full)} at full depth`;
  at("kv").textContent = format.percent(kvFull ? figures.kv_bytes_saved / kvFull : 0);
  at("kv-note").textContent = `holds ${format.bytes(figures.kv_bytes)} of ${format.bytes(kvFull)}`;
  at("same").textContent = words.total ? format.percent(words.same / words.total) : "–";
  at("same-note").textContent = `${words.same} of ${words.total} words`;

  at("tiles").hidden = false;
  full.mark(words.left);
  reduced.mark(words.right);
  showDifferences(words, reduced.title.textContent);
  return words.total ? `${speed} ${words.same} of ${words.total} words are the same.` : `${speed} Neither answer has a word.`;
}

/** The measured speed-up, with a remark on how it was measured. A text of one token has none. */
function showSpeed(full, reduced, remark) {
  const [fast, slow] = [reduced.figures.tokens_per_s, full.figures.tokens_per_s];
  const speedup = fast && slow ? fast / slow : null;
  const measured = speedup ? `${format.number(speedup, 2)}×` : "–";
  const { nominal_speedup: planned, prompt_layers: prompt, num_layers: all } = reduced.schedule;
  const prompts = prompt.length < all ? `, prompts run ${prompt.length} of ${all} layers` : "";
  const nominal = format.times(planned) + prompts;
  at("speedup").textContent = measured;
  at("speedup-note").textContent = `nominal ${nominal}; ${remark}`;
  drawBullet(speedup ?? 0, planned);
  return `Measured speed-up ${measured}, nominal ${nominal}.`;
}

function drawBullet(measured, nominal) {
  const bullet = at("bullet");
  const most = Math.max(measured, nominal, 1);
  bullet.style.setProperty("--measured", measured / most);
  bullet.style.setProperty("--nominal", nominal / most);
}

function showDifferences({ hunks, total }, name) {
  at("differences").hidden = false;
  at("differences-none").hidden = hunks.length > 0;
  at("differences-none").textContent = total ? "Nowhere: both texts are the same, word for word." : "Neither text has a word to compare.";
  at("differences-table").hidden = hunks.length === 0;
  at("differences-name").textContent = name;
  const rows = hunks.map((hunk) => {
    const row = document.createElement("tr");
    for (const text of [hunk.left, hunk.right]) {
      const cell = row.insertCell();
      cell.textContent = text || "nothing";
      cell.classList.toggle("nothing", !text);
    }
    return row;
  });
  at("differences-table").tBodies[0].replaceChildren(...rows);
}
