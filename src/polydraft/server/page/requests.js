// Requests to the server, and whether one runs. `hooks` says what the page does when one ends, or when the server is away.

import { $ } from './dom.js';
import { chosen } from './settings.js';

export const hooks = { ended() {}, lost() {} };
let running = null;

// The server cannot be reached, or a stream broke off; also where the page itself is closed.
export class Lost extends Error {
  reason = leaving ? 'closed' : 'lost';
}

let leaving = false;
addEventListener('beforeunload', () => {
  leaving = true;
  setTimeout(() => { leaving = false; }, 3000); // the page stayed
});

export function fail(message) {
  $('error').textContent = message ?? '';
  $('error').hidden = !message;
}

export function headers() {
  const key = $('key').value.trim();
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) };
}

export async function refusal(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server answered ${answer.status}`; }
}

async function reached(task) {
  try { return await task; } catch (error) { throw error.name === 'AbortError' ? error : new Lost(error.message); }
}

// Server-sent events of one request, each parsed.
export async function* events(path, request, signal) {
  const answer = await reached(fetch(path, { method: 'POST', headers: headers(), body: JSON.stringify(request), signal }));
  if (!answer.ok) throw new Error(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '', ended = false; !ended;) {
    const { value, done } = await reached(reader.read());
    if (done) throw new Lost('the stream broke off');
    const lines = (rest + value).split('\n\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(':')) continue; // what was read of the prompt
      const data = line.replace(/^data: /, '');
      ended ||= data === '[DONE]';
      if (!ended) yield JSON.parse(data);
    }
  }
}

export const isRunning = () => running !== null;
export const stop = () => running?.abort();

// One task at a time.  task: gets the signal that stops it.
export async function run(task) {
  if (running || !chosen.model) return;
  running = new AbortController();
  $('go').disabled = $('again').disabled = true;
  $('stop').disabled = false;
  $('more').hidden = true;
  $('stage').classList.add('busy');
  fail();
  try {
    await task(running.signal);
    if (chosen.model.loaded === false) hooks.lost();
  } catch (error) {
    if (error instanceof Lost) hooks.lost();
    if (error.name !== 'AbortError') fail(error instanceof Lost ? 'The server went away. Trying again …' : error.message);
  } finally {
    running = null;
    $('go').disabled = false;
    $('stop').disabled = true;
    $('stage').classList.remove('busy');
    hooks.ended();
  }
}
