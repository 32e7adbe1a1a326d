// Axes of charts, for the self-contained page and for the server's page.

/** Map values to pixels. The scale is logarithmic if the largest value exceeds `logFrom` times the smallest. */
export function scale(values, from, to, logFrom) {
  let low = Math.min(...values), high = Math.max(...values);
  const log = low > 0 && high > logFrom * low;
  if (log) {
    const room = (high / low) ** 0.08;
    [low, high] = [low / room, high * room];
  } else {
    const room = 0.1 * (high - low) || 0.2 * high || 1;
    [low, high] = [Math.max(0, low - room), high + room];
  }
  const bend = log ? Math.log10 : value => value;
  const at = value => from + (bend(value) - bend(low)) / (bend(high) - bend(low)) * (to - from);
  return {at, low, high, ticks: log ? logTicks(low, high) : ticks(low, high, Math.abs(to - from) / 60)};
}

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(2, most), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    found.push(...[1, 2, 5].map(factor => factor * 10 ** power).filter(value => low <= value && value <= high));
  }
  return found;
}
