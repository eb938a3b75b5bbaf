// One answer as it comes and as it was kept: text nodes, classes and MathML. No markup is ever made of what a model writes.

import { thoughtEnd } from './chats.js';
import { make } from './dom.js';
import { coloured, render } from './markdown.js';
import { Lost, events } from './requests.js';
import { asked, onChat } from './settings.js';
import { draw } from './tree.js';

// Why an answer is not whole, by its reason. `closed` is what an answer has that never heard how it ended.
const CUTS = {
  length: 'cut off at the limit of tokens',
  abort: 'stopped',
  lost: 'cut off: the server went away',
  error: 'cut off: the server failed',
  closed: 'cut off: the page was closed',
};
const NOTES = { length: 'ended at the limit of tokens', abort: 'stopped', error: 'failed', lost: 'the server went away' };

export const isCut = (reason) => reason in CUTS;

export function lane(name, kind) {
  const box = make('article', `lane ${kind}`), title = make('h2', '', name), figures = make('span', 'figures'), output = make('div', 'output');
  output.setAttribute('role', 'log');
  output.setAttribute('aria-label', name);
  output.tabIndex = 0;
  title.append(figures);
  box.append(title, output);
  document.getElementById('lanes').append(box);
  return { output, figures };
}

// A piece of an answer: where it stands in the text, and an empty node for it.
function piece(start, length, depth, title) {
  const kind = depth ? `token draft d${Math.min(depth, 5)}` : 'token target';
  const span = () => {
    const node = make('span', kind);
    node.title = title;
    return node;
  };
  return { start, end: start + length, depth, span };
}

function traced(token, start) {
  const drafted = token.source !== 'target';
  const chance = token.logprob === undefined ? '' : `, probability ${Math.exp(token.logprob).toPrecision(3)}`;
  const title = drafted ? `drafted by ${token.source}, depth ${token.depth}` : 'written by the target model';
  return piece(start, token.text.length, drafted ? token.depth : 0, title + chance);
}

// The tokens of an answer that was kept.
function restored(trace) {
  let start = 0;
  return trace.map(([length, depth]) => {
    const token = piece(start, length, depth, depth ? `drafted, depth ${depth}` : 'written by the target model');
    start = token.end;
    return token;
  });
}

const written = ({ text, thinks, tokens }) => ({ text, thinks, trace: tokens.map(({ start, end, depth }) => [end - start, depth]) });

function fill(box, { text, tokens, thinks, reason }) {
  const shown = document.createDocumentFragment();
  if (onChat()) {
    const end = thoughtEnd({ text, thinks });
    if (end) shown.append(reasoning(text, tokens, end, box.querySelector('.thought')?.open));
    shown.append(render(text.slice(end), tokens.map((token) => ({ ...token, start: token.start - end, end: token.end - end }))));
  } else coloured(text, tokens)(shown, 0, text.length);
  if (isCut(reason)) shown.append(make('p', 'note', CUTS[reason]));
  box.classList.toggle('cut', isCut(reason));
  box.replaceChildren(shown);
}

function reasoning(text, tokens, end, open = false) {
  const box = make('details', 'thought');
  box.open = open;
  box.append(make('summary', '', 'Reasoning'));
  coloured(text, tokens)(box, 0, end);
  return box;
}

const empty = () => make('div', onChat() ? 'answer markdown' : 'answer');

// kept: a turn as in chats.js.
export function shown(kept) {
  const box = empty();
  fill(box, { ...kept, tokens: restored(kept.trace) });
  return box;
}

// An answer that is about to come into a lane.  kept: what it goes on from.
export function begin(place, kept = { text: '', trace: [] }) {
  const counts = { fresh: 0, steps: 0, drafted: 0, accepted: 0, seconds: 0 };
  return { lane: place, box: empty(), text: kept.text, thinks: kept.thinks ?? false, tokens: restored(kept.trace), ...counts, began: performance.now(), reason: null };
}

function add(at, { tokens, tree }) {
  for (const token of tokens) {
    at.tokens.push(traced(token, at.text.length));
    at.text += token.text;
    at.fresh += 1;
  }
  if (tree) {
    at.steps += 1;
    at.drafted += tree.parents.length - 1;
    at.accepted += tree.path.length;
  }
  at.seconds = (performance.now() - at.began) / 1000;
  at.frame ||= requestAnimationFrame(() => show(at));
  if (tree && tree.parents.length > 1) draw(tree);
}

function show(at) {
  const { output } = at.lane, follows = output.scrollHeight - output.scrollTop - output.clientHeight < 60;
  at.frame = 0;
  fill(at.box, at);
  at.lane.figures.textContent = figures(at);
  if (follows) output.scrollTop = output.scrollHeight;
}

function figures(at) {
  const parts = [];
  if (at.fresh) parts.push(`${(at.fresh / at.seconds).toFixed(0)} tokens/s`);
  if (at.drafted) parts.push(`acceptance rate ${(100 * at.accepted / at.drafted).toFixed(0)}%`, `${(at.fresh / Math.max(at.steps, 1)).toFixed(2)} tokens per step`);
  if (NOTES[at.reason]) parts.push(NOTES[at.reason]);
  return parts.join(' · ');
}

// Follows the stream to its end, whatever ends it.  changed: called with what there is, so that it is kept.
export async function follow(at, content, { drafting, seed, signal, changed = () => {} }) {
  try {
    for await (const event of events(onChat() ? 'v1/chat/completions' : 'v1/completions', asked(content, drafting, seed), signal)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      at.reason = choice?.finish_reason ?? at.reason;
      at.thinks ||= Boolean(choice?.delta?.reasoning_content);
      if (!event.speculation) continue;
      add(at, event.speculation);
      changed(written(at));
    }
  } catch (error) {
    at.reason = error.name === 'AbortError' ? 'abort' : error instanceof Lost ? error.reason : 'error';
    if (at.reason !== 'abort') throw error;
  } finally {
    cancelAnimationFrame(at.frame);
    if (at.text) show(at);
    else at.box.remove();
  }
}
