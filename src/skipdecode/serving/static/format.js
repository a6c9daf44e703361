/** Numbers as text. */

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const rate = (value) => number(value, value < 100 ? 1 : 0);

export const times = (value) => `${number(value, 2).replace(/\.?0+$/, "")}×`;

/** The speed-up of each schedule; where several have the same one, or prompts alone are shorter, with the layers that prompts run. */
export function speedups(schedules) {
  const shown = schedules.map((schedule) => times(schedule.nominal_speedup));
  return schedules.map(({ prompt_layers: layers, nominal_speedup: nominal }, index) => {
    const shared = shown.filter((text) => text === shown[index]).length > 1;
    return { speedup: shown[index], prompts: shared || nominal === 1 ? layers.length : null };
  });
}

export const percent = (share) => `${number(100 * share)}%`;

export const seconds = (value) => `${number(value, value < 10 ? 2 : 1)} s`;

export function bytes(value) {
  const mebibytes = value / 2 ** 20;
  return mebibytes < 1 ? `${number(value / 2 ** 10)} KiB` : `${number(mebibytes, mebibytes < 10 ? 1 : 0)} MiB`;
}

/** A token's text with its white space made visible. */
export const visible = (text) => text.replace(/\n/g, "↵").replace(/^ | $/g, "␣");
