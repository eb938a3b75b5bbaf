// What the browser keeps: `local` until it is deleted, `tab` until the tab is closed. A browser may keep nothing, or be full.

const KEY = 'polydraft';
const AREAS = { local: () => localStorage, tab: () => sessionStorage };

function attempt(task, otherwise) {
  try { return task(); } catch { return otherwise; }
}

const named = (name) => (name ? `${KEY}.${name}` : KEY);

export const read = (area, name) => attempt(() => JSON.parse(AREAS[area]().getItem(named(name))), null);

// Whether it is kept.
export const write = (area, name, value) => attempt(() => { AREAS[area]().setItem(named(name), JSON.stringify(value)); return true; }, false);

export const remove = (area, name) => attempt(() => AREAS[area]().removeItem(named(name)));

// Names that begin so.
export function names(area, beginning) {
  const start = named(beginning);
  return attempt(() => Object.keys(AREAS[area]()), []).filter((key) => key.startsWith(start)).map((key) => key.slice(KEY.length + 1));
}

// A task that is due with every token, once a second.
export function seldom(task) {
  let last = performance.now();
  return () => {
    if (performance.now() - last < 1000) return;
    task();
    last = performance.now();
  };
}
