// A text that goes on, and the race of one request without and with drafts.

import { begin, follow, isCut, lane, shown } from './answer.js';
import { $, make } from './dom.js';
import { isRunning, run } from './requests.js';
import { drafts, number, onChat } from './settings.js';
import { read, remove, seldom, write } from './storage.js';
import { draw } from './tree.js';

// The text of this tab: its prompt, and an answer as in chats.js. It comes back when the page is loaded again.
let kept = read('tab', 'text');
let raced = null;

const keep = () => write('tab', 'text', kept);

export function viewText() {
  $('lanes').replaceChildren();
  const { output } = lane('Text', 'text');
  if (kept) output.append(make('span', 'said', kept.prompt), shown(kept));
  output.scrollTop = output.scrollHeight;
  draw(null);
  offerText();
}

export function viewRace() {
  $('lanes').replaceChildren();
  raced = null;
  draw(null);
  offerRace();
  return ['plain', 'speculative'].map((name) => lane(name, 'race'));
}

export function offerText() {
  $('again').disabled = isRunning() || !kept;
  $('more').hidden = isRunning() || !isCut(kept?.reason);
  $('more').onclick = () => {
    $('prompt').value = kept.prompt + kept.text;
    continueText($('prompt').value);
  };
}

export function offerRace() {
  $('again').disabled = isRunning() || !raced;
  $('more').hidden = true;
}

export function clearText() {
  kept = null;
  remove('tab', 'text');
  viewText();
}

export const againText = () => continueText(kept.prompt);
export const againRace = () => race(raced);

export function continueText(prompt) {
  return run(async (signal) => {
    kept = { prompt, text: '', trace: [], reason: null };
    viewText();
    const output = $('lanes').querySelector('.output'), figures = $('lanes').querySelector('.figures');
    const at = begin({ output, figures });
    output.querySelector('.answer').replaceWith(at.box);
    const save = seldom(keep), text = kept;
    const changed = (written) => {
      Object.assign(text, written, { reason: 'closed' });
      save();
    };
    try {
      await follow(at, prompt, { drafting: drafts(), seed: number('seed'), signal, changed });
    } finally {
      text.reason = at.reason;
      if (kept === text && !at.text) clearText();
      else if (kept === text) keep();
    }
  });
}

// One after the other: in one batch each would share the other's forward passes.
export function race(prompt) {
  return run(async (signal) => {
    const lanes = viewRace(), seed = number('seed') ?? Math.floor(1e9 * Math.random());
    const content = onChat() ? [{ role: 'user', content: prompt }] : prompt, runs = [];
    raced = prompt;
    for (const { output } of lanes) output.append(make(onChat() ? 'div' : 'span', onChat() ? 'user' : 'said', prompt));
    for (const [n, place] of lanes.entries()) {
      const at = begin(place);
      place.output.append(at.box);
      await follow(at, content, { drafting: n === 1, seed, signal });
      if (at.reason === 'abort') return;
      runs.push(at);
    }
    const [slow, fast] = runs, ratio = (fast.fresh / fast.seconds) / (slow.fresh / slow.seconds);
    fast.lane.figures.textContent += ` · ${ratio.toFixed(2)}x · ${slow.text === fast.text ? 'the same text' : 'another text of the same distribution'}`;
  });
}

addEventListener('pagehide', () => isRunning() && kept && keep());
