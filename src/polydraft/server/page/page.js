// One page for three things: a chat, a text, and the same request without and with drafts. Chunks of a stream carry `speculation`: each token's
// origin, and the draft tree of its step. Here its parts are joined: models, tabs, buttons and keys.

import * as conversation from './conversation.js';
import { $ } from './dom.js';
import { fail, headers, hooks, isRunning, refusal, stop } from './requests.js';
import { chosen, describe, limits, onChat, restore, verifiers } from './settings.js';
import { unfold } from './shelf.js';
import { read, write } from './storage.js';
import * as texts from './texts.js';

const TEXT = 'class Stack:\n    """A stack."""\n\n    def __init__(self):\n';
const RACE = 'Write a Python function that merges two sorted lists.';
const MODES = {
  chat: { begin: conversation.ask, again: conversation.again, view: conversation.view, offer: conversation.offer, verb: 'Send', rows: 2 },
  text: { begin: texts.continueText, again: texts.againText, view: texts.viewText, offer: texts.offerText, verb: 'Generate', rows: 4 },
  race: { begin: texts.race, again: texts.againRace, view: texts.viewRace, offer: texts.offerRace, verb: 'Race', rows: 4 },
};
const prompts = read('tab', 'prompts') ?? {}; // what is written and not sent

const mode = () => MODES[chosen.mode];

// The models; requested until they come, and again after a server went away.
async function connect() {
  try {
    const answer = await fetch('v1/models', { headers: headers() });
    if (!answer.ok) throw new Error(await refusal(answer));
    const first = !chosen.model, before = $('models').value;
    chosen.models = (await answer.json()).data;
    $('models').replaceChildren(...chosen.models.map(({ id, loaded }) => new Option(loaded === false ? `${id} (loads when used)` : id, id)));
    if (chosen.models.some(({ id }) => id === before)) $('models').value = before;
    describe();
    fail();
    if (first) choose(remembered());
  } catch (error) {
    $('model').textContent = 'not connected';
    fail(error instanceof TypeError ? 'The server cannot be reached. Trying again …' : error.message);
    setTimeout(connect, 1500);
  }
}

function remembered() {
  const name = read('tab', 'mode');
  if (name in MODES && (name !== 'chat' || chosen.model.chat !== false)) return name;
  return chosen.model.chat ? 'chat' : 'text';
}

function choose(name) {
  stop();
  chosen.mode = name;
  write('tab', 'mode', name);
  for (const other of Object.keys(MODES)) $(`tab-${other}`).setAttribute('aria-selected', other === name);
  $('stage').setAttribute('aria-labelledby', `tab-${name}`);
  document.body.dataset.mode = name;
  $('prompt').value = prompts[name] ?? { chat: '', text: TEXT, race: onChat() ? RACE : TEXT }[name];
  $('prompt').rows = mode().rows;
  $('prompt').placeholder = onChat() ? 'Write a message' : 'Text to continue';
  $('hint').textContent = name === 'chat' ? 'Enter sends, Esc stops' : 'Ctrl+Enter generates, Esc stops';
  $('go').textContent = mode().verb;
  limits();
  fail();
  mode().view();
}

function written() {
  prompts[chosen.mode] = $('prompt').value;
  write('tab', 'prompts', prompts);
}

function go() {
  const prompt = $('prompt').value;
  if (!prompt.trim() || isRunning() || !chosen.model) return;
  if (chosen.mode === 'chat') $('prompt').value = '';
  mode().begin(prompt);
  written();
}

function clear() {
  stop();
  delete prompts[chosen.mode];
  if (chosen.mode === 'text') texts.clearText();
  choose(chosen.mode);
}

function begin() {
  conversation.open();
  $('prompt').focus();
}

hooks.lost = connect;
hooks.ended = () => mode().offer();
for (const name of Object.keys(MODES)) $(`tab-${name}`).addEventListener('click', () => choose(name));
document.querySelector('nav').addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...event.currentTarget.querySelectorAll('button:enabled')];
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus();
  next.click();
});
$('models').addEventListener('change', () => {
  describe();
  choose(chosen.mode === 'chat' && chosen.model.chat === false ? 'text' : chosen.mode);
});
$('drafter').addEventListener('change', verifiers);
$('colours').addEventListener('change', () => document.body.classList.toggle('plain', !$('colours').checked));
$('prompt').addEventListener('input', written);
$('ask').addEventListener('submit', (event) => {
  event.preventDefault();
  go();
});
$('controls').addEventListener('submit', (event) => event.preventDefault());
$('key').addEventListener('change', connect);
$('stop').addEventListener('click', stop);
$('again').addEventListener('click', () => mode().again());
$('clear').addEventListener('click', clear);
$('new').addEventListener('click', begin);
$('fold').addEventListener('click', () => unfold(!document.body.classList.contains('unfolded')));
addEventListener('storage', () => chosen.mode === 'chat' && chosen.model && conversation.offer());
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') stop();
  const sends = event.ctrlKey || event.metaKey || (chosen.mode === 'chat' && event.target === $('prompt') && !event.shiftKey);
  if (event.key !== 'Enter' || !sends || event.isComposing) return;
  event.preventDefault();
  go();
});
restore();
connect();
