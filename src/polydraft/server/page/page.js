// One page for three things: a chat, a text, and the same request without and with drafts. Chunks of a stream carry `speculation`: each token's
// origin, and the draft tree of its step. Everything is text nodes and classes: no markup is ever made of what a model writes.

import { coloured, render } from './markdown.js';

const $ = (id) => document.getElementById(id);
const make = (tag, kind, text) => { const e = document.createElement(tag); e.className = kind; e.textContent = text ?? ''; return e; };
const TEXT = 'class Stack:\n    """A stack."""\n\n    def __init__(self):\n';
const EXAMPLES = ['Explain speculative decoding in three sentences.', 'Write a Python function that merges two sorted lists.', 'Plan a weekend in the mountains, day by day.'];
const TEXT_TOKENS = 256; // of a text without a limit: base models do not end by themselves
const STORED = ['system', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'tokens', 'theme'];
let mode = 'text', models = [], model = null, running = null, talk = [], last = null;

function fail(message) { $('error').textContent = message ?? ''; $('error').hidden = !message; }

function headers() {
  const key = $('key').value.trim();
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refusal(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server answered ${answer.status}`; }
}

// The models; requested until they come, and again after a server went away.
async function connect() {
  try {
    const answer = await fetch('v1/models', { headers: headers() });
    if (!answer.ok) throw new Error(await refusal(answer));
    const first = !model, chosen = $('models').value;
    models = (await answer.json()).data;
    $('models').replaceChildren(...models.map(({ id, loaded }) => new Option(loaded === false ? `${id} (loads when used)` : id, id)));
    if (models.some(({ id }) => id === chosen)) $('models').value = chosen;
    describe();
    fail();
    if (first) choose(model.chat ? 'chat' : 'text');
  } catch (error) {
    $('model').textContent = 'not connected';
    fail(error instanceof TypeError ? 'The server cannot be reached. Trying again …' : error.message);
    setTimeout(connect, 1500);
  }
}

// What is known of the chosen model; nothing but its name before it is loaded.
function describe() {
  model = models.find(({ id }) => id === $('models').value) ?? models[0];
  const { drafter, drafters = [], verifier, lossless } = model.speculation ?? {};
  const drafts = model.speculation ? `drafts: ${drafter ?? 'none'} · verifier: ${verifier}${lossless ? ', lossless' : ''}` : 'loads with the first request';
  $('model').textContent = drafts;
  const before = $('drafter').value;
  offer('drafter', drafters, drafters.includes(before) ? before : drafters[0]);
  verifiers();
  $('tab-chat').disabled = model.chat === false;
}

function offer(id, names, chosen) {
  $(id).replaceChildren(...names.map((name) => new Option(name === 'none' ? 'none: plain decoding' : name, name, false, name === chosen)));
}

// Those that are exact for the chosen drafter; the server's own choice first.
function verifiers() {
  const names = model.speculation?.verifiers[$('drafter').value] ?? [];
  offer('verifier', ['auto', ...names], 'auto');
  for (const id of ['verifier', 'depth', 'paths']) $(id).disabled = $('drafter').value === 'none';
}

function lane(name) {
  const box = make('article', `lane ${mode}`), title = make('h2', '', name), figures = make('span', 'figures'), output = make('div', 'output');
  output.setAttribute('role', 'log'); output.setAttribute('aria-label', name); output.tabIndex = 0;
  title.append(figures); box.append(title, output); $('lanes').append(box);
  return { output, figures };
}

const onChat = () => mode === 'chat' || (mode === 'race' && model.chat);

function choose(wanted) {
  mode = wanted;
  for (const name of ['chat', 'text', 'race']) $(`tab-${name}`).setAttribute('aria-selected', name === mode);
  $('stage').setAttribute('aria-labelledby', `tab-${mode}`);
  clear();
}

function clear() {
  running?.abort();
  talk = []; last = null;
  $('lanes').replaceChildren();
  $('prompt').value = onChat() ? (mode === 'race' ? 'Write a Python function that merges two sorted lists.' : '') : TEXT;
  $('prompt').rows = mode === 'chat' ? 2 : 4;
  document.querySelector('.hint').textContent = mode === 'chat' ? 'Enter sends, Esc stops' : 'Ctrl+Enter generates, Esc stops';
  $('prompt').placeholder = onChat() ? 'Write a message' : 'Text to continue';
  $('tokens').placeholder = onChat() ? 'rest of the context' : `${TEXT_TOKENS}`;
  $('system').disabled = !onChat();
  $('go').textContent = { chat: 'Send', text: 'Generate', race: 'Race' }[mode];
  $('again').disabled = true; $('more').hidden = true;
  for (const name of mode === 'race' ? ['plain', 'speculative'] : [mode === 'chat' ? 'Conversation' : 'Text']) lane(name);
  if (mode === 'chat') invite(first().output);
  draw(null);
}

// What an empty conversation may begin with.
function invite(output) {
  const box = make('div', 'invite');
  box.append(make('p', '', 'Write a message below, or try one of these:'));
  for (const text of EXAMPLES) {
    const button = make('button', '', text);
    button.type = 'button';
    button.addEventListener('click', () => { $('prompt').value = text; go(); });
    box.append(button);
  }
  output.append(box);
}

const number = (id) => ($(id).value === '' ? undefined : Number($(id).value));

function messages(turns) {
  const system = $('system').value.trim();
  return system ? [{ role: 'system', content: system }, ...turns] : turns;
}

// content: turns of a chat, or a text.
function body(content, drafting, seed) {
  const drafter = ['none', ''].includes($('drafter').value) ? 'auto' : $('drafter').value, verifier = $('verifier').value || 'auto';
  const shape = { depth: number('depth'), num_paths: number('paths'), drafter, verifier };
  const speculation = { enabled: drafting, trace: true, ...(drafting && shape) };
  const sampling = { temperature: number('temperature') ?? (mode === 'race' ? 0 : undefined), top_p: number('top_p'), top_k: number('top_k'), min_p: number('min_p'), seed };
  const request = { model: model.id, stream: true, ...sampling, max_tokens: number('tokens') ?? (onChat() ? undefined : TEXT_TOKENS), speculation };
  return onChat()
    ? { ...request, messages: messages(content), continue_final_message: content.at(-1).role === 'assistant', logprobs: true, top_logprobs: 0 }
    : { ...request, prompt: content, logprobs: 0 };
}

// Server-sent events of one request, each parsed.
async function* events(path, request, signal) {
  const answer = await fetch(path, { method: 'POST', headers: headers(), body: JSON.stringify(request), signal });
  if (!answer.ok) throw new Error(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '', ended = false; !ended;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError('the stream broke off');
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

// A token of an answer: where it stands in the text, and an empty node for a piece of it.
function traced(token, start) {
  const drafted = token.source !== 'target', depth = drafted ? ` draft d${Math.min(token.depth, 5)}` : ' target';
  const chance = token.logprob === undefined ? '' : `, probability ${Math.exp(token.logprob).toPrecision(3)}`;
  const title = `${drafted ? `drafted by ${token.source}, depth ${token.depth}` : 'written by the target model'}${chance}`;
  return { start, end: start + token.text.length, span: () => { const span = make('span', `token${depth}`); span.title = title; return span; } };
}

function add(at, { tokens, tree }) {
  for (const token of tokens) {
    at.tokens.push(traced(token, at.text.length));
    at.text += token.text;
  }
  if (tree) { at.steps += 1; at.drafted += tree.parents.length - 1; at.accepted += tree.path.length; }
  at.seconds = (performance.now() - at.began) / 1000;
  if (!at.frame) at.frame = requestAnimationFrame(() => show(at));
  if (tree && tree.parents.length > 1) draw(tree);
}

const THOUGHT = /^\s*<think>([\s\S]*?)(<\/think>\s*|$)/;

function show(at) {
  at.frame = 0;
  const { output } = at.lane, follows = output.scrollHeight - output.scrollTop - output.clientHeight < 60;
  const thought = onChat() ? THOUGHT.exec(at.text)?.[0].length ?? 0 : 0, shown = document.createDocumentFragment();
  if (thought) {
    const box = make('details', 'thought');
    box.open = at.answer.querySelector('.thought')?.open ?? false;
    box.append(make('summary', '', 'Reasoning'));
    coloured(at.text, at.tokens)(box, 0, thought);
    shown.append(box);
  }
  if (onChat()) shown.append(render(at.text.slice(thought), at.tokens.map((token) => ({ ...token, start: token.start - thought, end: token.end - thought }))));
  else coloured(at.text, at.tokens)(shown, 0, at.text.length);
  at.answer.replaceChildren(shown);
  at.lane.figures.textContent = figures(at);
  if (follows) output.scrollTop = output.scrollHeight;
}

function figures(at) {
  const speed = `${(at.tokens.length / at.seconds).toFixed(0)} tokens/s`;
  const drafts = at.drafted ? ` · acceptance rate ${(100 * at.accepted / at.drafted).toFixed(0)}% · ${(at.tokens.length / Math.max(at.steps, 1)).toFixed(2)} tokens per step` : '';
  return speed + drafts + (at.note ? ` · ${at.note}` : '');
}

const NOTES = { length: 'ended at the limit of tokens', abort: 'stopped', error: 'failed' };

// One answer into a lane.
async function answer(place, content, drafting, seed, signal) {
  const box = make('div', onChat() ? 'answer markdown' : 'answer');
  place.output.append(box);
  const at = { lane: place, answer: box, tokens: [], text: '', steps: 0, drafted: 0, accepted: 0, began: performance.now(), seconds: 0, reason: null };
  try {
    for await (const event of events(onChat() ? 'v1/chat/completions' : 'v1/completions', body(content, drafting, seed), signal)) {
      if (event.error) throw new Error(event.error.message);
      at.reason = event.choices?.[0]?.finish_reason ?? at.reason;
      if (event.speculation) add(at, event.speculation);
    }
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
    at.reason = 'abort';
  } finally {
    cancelAnimationFrame(at.frame);
    at.note = NOTES[at.reason];
    if (at.tokens.length) show(at);
    else box.remove();
    box.classList.toggle('cut', at.reason === 'length');
  }
  return at;
}

async function run(task) {
  if (running || !model) return;
  running = new AbortController();
  $('go').disabled = $('again').disabled = true; $('stop').disabled = false; $('more').hidden = true;
  fail();
  try {
    await task(running.signal);
    if (model.loaded === false) connect();
  } catch (error) {
    if (error instanceof TypeError) connect();
    if (error.name !== 'AbortError') fail(error instanceof TypeError ? 'The server went away. Trying again …' : error.message);
  } finally {
    running = null;
    $('go').disabled = false; $('stop').disabled = true; $('again').disabled = !last;
  }
}

function go() {
  const prompt = $('prompt').value;
  if (!prompt.trim() || running || !model) return;
  if (mode === 'chat') { talk.push({ role: 'user', content: prompt }); $('prompt').value = ''; }
  last = { chat: send, text: () => write(prompt), race: () => race(prompt) }[mode];
  last();
}

const first = () => { const box = $('lanes').firstChild; return { output: box.querySelector('.output'), figures: box.querySelector('.figures') }; };

// The next turn of the conversation, which ends with the user's message, or with an answer that goes on.
function send() {
  return run(async (signal) => {
    const place = first(), turns = [...talk], begun = talk.at(-1)?.role === 'assistant' ? talk.at(-1) : null;
    place.output.replaceChildren();
    for (const turn of talk) place.output.append(turn.shown ?? make('div', 'user', turn.content));
    begun?.shown.classList.remove('cut');
    place.output.scrollTop = place.output.scrollHeight;
    const plain = turns.map(({ role, content }) => ({ role, content }));
    let at = null;
    try { at = await answer(place, plain, $('drafter').value !== 'none', number('seed'), signal); } finally {
      const box = place.output.querySelector('.answer:last-child'), text = at?.text ?? (box === begun?.shown ? '' : box?.textContent ?? '');
      if (!place.output.isConnected) talk.length = 0; // cleared meanwhile
      else if (text && box) keep(box, text.replace(THOUGHT, ''), begun);
      else if (!begun) { // not answered: the message is the prompt again
        const { content } = talk.pop();
        $('prompt').value ||= content;
        place.output.querySelector('.user:last-child')?.remove();
      }
    }
    if (!place.output.isConnected) return;
    $('more').hidden = !['length', 'abort'].includes(at.reason) || talk.at(-1)?.role !== 'assistant';
    $('more').onclick = () => send();
  });
}

// An answer joins the conversation; one that goes on becomes one with what it continues.
function keep(box, text, begun) {
  if (!begun) { talk.push({ role: 'assistant', content: text, shown: box }); return; }
  const whole = make('div', box.className), joined = begun.content + text;
  whole.append(...begun.shown.childNodes, ...box.childNodes);
  begun.shown.replaceWith(whole);
  box.remove();
  talk[talk.length - 1] = { role: 'assistant', content: joined, shown: whole };
}

// text: what a generation continues.  more: whether it stays on the page.
function write(text) {
  return run(async (signal) => {
    $('lanes').replaceChildren();
    const place = lane('Text');
    place.output.append(make('span', 'said', text));
    const at = await answer(place, text, $('drafter').value !== 'none', number('seed'), signal);
    $('more').hidden = !['length', 'abort'].includes(at.reason);
    $('more').onclick = () => { $('prompt').value = text + at.text; go(); };
  });
}

function again() {
  if (mode === 'chat' && talk.at(-1)?.role === 'assistant') talk.pop();
  if (mode !== 'chat' || talk.length) last?.();
}

// One after the other: in one batch each would share the other's forward passes.
function race(prompt) {
  return run(async (signal) => {
    $('lanes').replaceChildren();
    const plain = lane('plain'), fast = lane('speculative'), seed = number('seed') ?? Math.floor(1e9 * Math.random());
    for (const { output } of [plain, fast]) output.append(make(onChat() ? 'div' : 'span', onChat() ? 'user' : 'said', prompt));
    const content = onChat() ? [{ role: 'user', content: prompt }] : prompt;
    const slow = await answer(plain, content, false, seed, signal);
    if (slow.reason === 'abort') return;
    const quick = await answer(fast, content, true, seed, signal);
    if (quick.reason === 'abort') return;
    const ratio = (quick.tokens.length / quick.seconds) / (slow.tokens.length / slow.seconds);
    fast.figures.textContent += ` · ${ratio.toFixed(2)}x · ${slow.text === quick.text ? 'the same text' : 'another text of the same distribution'}`;
  });
}

const short = (text, room) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);

// A step's draft tree from left to right: depth is the column, leaves share the height.
function draw(tree) {
  const svg = $('tree'), ns = 'http://www.w3.org/2000/svg';
  svg.replaceChildren();
  if (!tree) { svg.setAttribute('aria-label', 'No draft yet'); return; }
  const { texts, parents, path } = tree, accepted = new Set([0, ...path]), below = texts.map(() => []), depth = texts.map(() => 0);
  parents.forEach((parent, n) => { if (parent >= 0) { below[parent].push(n); depth[n] = depth[parent] + 1; } });
  const y = []; let leaves = 0;
  (function place(n) { below[n].forEach(place); y[n] = below[n].length ? below[n].reduce((sum, m) => sum + y[m], 0) / below[n].length : leaves++; })(0);
  // As large as its place, or larger where tokens could not be read: it is scrolled then.
  const { clientWidth, clientHeight } = svg.parentElement, columns = Math.max(...depth) + 1;
  const step = Math.max(64, (clientWidth - 20) / columns), high = Math.max(leaves * 30, clientHeight - 30), room = Math.floor((step - 6) / 7.3);
  svg.setAttribute('width', columns * step + 20); svg.setAttribute('height', high + 24);
  const at = (n) => [12 + depth[n] * step, 22 + (y[n] + 0.5) * (high / Math.max(leaves, 1)) - 6];
  const put = (tag, attributes, on) => {
    const e = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
    if (on) e.setAttribute('class', 'accepted');
    svg.append(e);
    return e;
  };
  parents.forEach((parent, n) => {
    if (parent < 0) return;
    const [x0, y0] = at(parent), [x1, y1] = at(n), middle = (x0 + x1) / 2;
    put('path', { d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` }, accepted.has(n));
  });
  texts.forEach((text, n) => {
    const [x, top] = at(n);
    put('circle', { cx: x, cy: top, r: 4 }, accepted.has(n));
    put('text', { x: x - 4, y: top - 8 }, accepted.has(n)).textContent = short(text.replace(/\n/g, '↵').replace(/ /g, '·'), room);
  });
  svg.setAttribute('aria-label', `${texts.length - 1} draft tokens, ${path.length} accepted`);
}

// Settings stay in the browser, but for the key.
function store() {
  try { localStorage.setItem('polydraft', JSON.stringify(Object.fromEntries(STORED.map((id) => [id, $(id).value])))); } catch { /* a private window */ }
}

function restore() {
  try { for (const [id, value] of Object.entries(JSON.parse(localStorage.getItem('polydraft') ?? '{}'))) if (STORED.includes(id)) $(id).value = value; } catch { /* none */ }
  paint();
}

function paint() {
  if ($('theme').value) document.documentElement.dataset.theme = $('theme').value;
  else delete document.documentElement.dataset.theme;
}

for (const name of ['chat', 'text', 'race']) $(`tab-${name}`).addEventListener('click', () => choose(name));
document.querySelector('nav').addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...event.currentTarget.querySelectorAll('button:enabled')];
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus(); next.click();
});
$('models').addEventListener('change', () => { describe(); choose(model.chat === false ? 'text' : mode); });
$('drafter').addEventListener('change', verifiers);
$('theme').addEventListener('change', paint);
$('colours').addEventListener('change', () => document.body.classList.toggle('plain', !$('colours').checked));
for (const id of STORED) $(id).addEventListener('change', store);
$('ask').addEventListener('submit', (event) => { event.preventDefault(); go(); });
$('controls').addEventListener('submit', (event) => event.preventDefault());
$('key').addEventListener('change', connect);
$('stop').addEventListener('click', () => running?.abort());
$('again').addEventListener('click', again);
$('clear').addEventListener('click', clear);
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') running?.abort();
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey || (mode === 'chat' && event.target === $('prompt') && !event.shiftKey))) { event.preventDefault(); go(); }
});
restore();
connect();
