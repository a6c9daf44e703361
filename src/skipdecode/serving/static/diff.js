/** Which words two texts do not share (longest common subsequence). */

/** The words and punctuation marks of a text: [{ word, start, end }], in characters. */
export function words(text) {
  return [...text.matchAll(/[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*|[^\s\p{L}\p{N}]/gu)].map((m) => ({ word: m[0], start: m.index, end: m.index + m[0].length }));
}

/**
 * Compares two texts word by word.
 * Returns { same, total, left, right, hunks }: words in common, words of the longer text, the differing words of each
 * side, and the places where they differ as [{ left, right }] texts.
 */
export function compare(leftText, rightText) {
  const a = words(leftText);
  const b = words(rightText);
  const table = commonLengths(a, b);
  const result = { same: 0, total: Math.max(a.length, b.length), left: [], right: [], hunks: [] };
  let hunk = null;
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i].word === b[j].word) {
      result.same++;
      hunk = null;
      i++;
      j++;
      continue;
    }
    if (!hunk) result.hunks.push((hunk = { left: [], right: [] }));
    if (j === b.length || (i < a.length && table[i + 1][j] >= table[i][j + 1])) {
      result.left.push(a[i]);
      hunk.left.push(a[i++]);
    } else {
      result.right.push(b[j]);
      hunk.right.push(b[j++]);
    }
  }
  result.hunks = result.hunks.map((h) => ({ left: stretch(leftText, h.left), right: stretch(rightText, h.right) }));
  return result;
}

/** The part of a text from the first to the last of neighbouring words. */
const stretch = (text, part) => (part.length ? text.slice(part[0].start, part.at(-1).end) : "");

/** table[i][j]: length of the longest common subsequence of a[i:] and b[j:]. */
function commonLengths(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i][j] =
        a[i].word === b[j].word ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  return table;
}
