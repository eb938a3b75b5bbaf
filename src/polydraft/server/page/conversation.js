// The open chat: its turns, what is done with each of them, and the next answer.

import { begin, follow, isCut, lane, shown } from './answer.js';
import * as chats from './chats.js';
import { $, button, copies, make } from './dom.js';
import { isRunning, run, stop } from './requests.js';
import { drafts, number } from './settings.js';
import { list, unfold, unkept } from './shelf.js';
import { read, seldom, write } from './storage.js';
import { draw } from './tree.js';

const EXAMPLES = ['Explain speculative decoding in three sentences.', 'Write a Python function that merges two sorted lists.', 'Plan a weekend in the mountains, day by day.'];

// The chat of this tab comes back when the page is loaded again.
let chat = chats.find(read('tab', 'open')) ?? chats.fresh();
let place = null;

export const isEmpty = () => chat.turns.length === 0;

export function open(other) {
  stop();
  unfold(false);
  chat = other ?? chats.fresh();
  write('tab', 'open', chat.id);
  view();
}

export function view() {
  $('lanes').replaceChildren();
  place = lane('Conversation', 'chat');
  for (const turn of chat.turns) place.output.append(boxed(turn, turn.role === 'user' ? make('div', 'user', turn.content) : shown(turn)));
  if (isEmpty()) place.output.append(invitation());
  place.output.scrollTop = place.output.scrollHeight;
  draw(null);
  offer();
}

// What fits the last turn.
export function offer() {
  const last = chat.turns.at(-1);
  $('again').disabled = isRunning() || !last;
  $('more').hidden = isRunning() || !isCut(last?.reason);
  $('more').onclick = () => send();
  list(chat, open, renamed);
}

function keep(current) {
  unkept(!chats.save(current));
  if (current === chat) write('tab', 'open', chat.id);
}

function renamed(other) {
  if (other.id === chat.id) chat.title = other.title;
  offer();
}

// What an empty chat may begin with.
function invitation() {
  const box = make('div', 'invite');
  box.append(make('p', '', 'Write a message below, or try one of these:'));
  for (const text of EXAMPLES) box.append(button(text, () => isRunning() || ask(text)));
  return box;
}

function boxed(turn, box) {
  const whole = make('div', turn.role === 'user' ? 'turn mine' : 'turn'), tools = make('div', 'tools');
  tools.append(copies(() => chats.said(turn)), button('Edit', () => isRunning() || whole.replaceChildren(editor(turn))));
  if (turn.role === 'user') tools.append(button('Delete', () => isRunning() || forget(turn)));
  whole.append(box, tools);
  return whole;
}

function forget(turn) {
  if (!confirm('Delete this message and all that follows it?')) return;
  chat.turns.splice(chat.turns.indexOf(turn));
  keep(chat);
  view();
}

// A message that was edited is answered anew; an answer that was edited stands as it is then.
function editor(turn) {
  const box = make('form', 'editor'), area = make('textarea'), row = make('div', 'row'), save = make('button', '', turn.role === 'user' ? 'Send' : 'Save');
  area.value = turn.content ?? turn.text;
  area.rows = Math.min(area.value.split('\n').length + 1, 14);
  area.setAttribute('aria-label', turn.role === 'user' ? 'Your message' : 'The answer');
  row.append(save, button('Cancel', view));
  box.append(area, row);
  box.addEventListener('submit', (event) => {
    event.preventDefault();
    if (area.value.trim() && !isRunning()) changed(turn, area.value);
  });
  box.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') view();
    if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    event.stopPropagation();
    box.requestSubmit();
  });
  queueMicrotask(() => area.focus());
  return box;
}

function changed(turn, text) {
  if (turn.role === 'user') {
    turn.content = text;
    chat.turns.splice(chat.turns.indexOf(turn) + 1);
  } else Object.assign(turn, { text, trace: [[text.length, 0]], reason: 'stop' });
  keep(chat);
  view();
  if (turn.role === 'user') send();
}

export function ask(text) {
  chat.turns.push({ role: 'user', content: text });
  send();
}

// The last answer once more; the old one stays where none comes.
export function again() {
  const last = chat.turns.at(-1);
  if (last?.role === 'assistant') chat.turns.pop();
  if (!isEmpty()) send(last?.role === 'assistant' ? last : null);
}

// The answer to the last message, or the rest of the last answer.  before: the answer that it replaces.
function send(before = null) {
  return run(async (signal) => {
    const current = chat, { turns } = chat, last = turns.at(-1), goesOn = last.role === 'assistant';
    const turn = goesOn ? last : { role: 'assistant', text: '', trace: [] }, reason = turn.reason;
    const messages = chats.messages(turns);
    if (goesOn) messages.at(-1).content = chats.whole(last);
    keep(current);
    view();
    const at = begin(place, turn), box = boxed(turn, at.box);
    if (goesOn) place.output.lastChild.replaceWith(box);
    else place.output.append(box);
    const save = seldom(() => keep(current));
    const changed = (written) => {
      if (!turns.includes(turn)) turns.push(turn);
      Object.assign(turn, written, { reason: 'closed' });
      save();
    };
    try {
      await follow(at, messages, { drafting: drafts(), seed: number('seed'), signal, changed });
    } finally {
      turn.reason = at.fresh ? at.reason : reason;
      if (!turns.includes(turn)) unanswered(current, before);
      keep(current);
    }
  });
}

// The old answer comes back, or the message is the prompt again.
function unanswered(current, before) {
  if (before) current.turns.push(before);
  else {
    const { content } = current.turns.pop();
    if (current === chat) $('prompt').value ||= content;
  }
  if (current === chat) view();
}

// A page that is closed keeps what came.
addEventListener('pagehide', () => isRunning() && chats.save(chat));
