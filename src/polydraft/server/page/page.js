// One page for three things: a chat, a text, and the same request without and with drafts. Chunks of a stream carry `speculation`: each token's
// origin, and the tree of its round. Everything is text nodes and classes: no markup is ever made of what a model writes.

const $ = (id) => document.getElementById(id);
const make = (tag, kind, text) => { const e = document.createElement(tag); e.className = kind; e.textContent = text ?? ''; return e; };
const TEXT = 'class Stack:\n    """A stack."""\n\n    def __init__(self):\n';
let mode = 'text', model = null, stopping = null, talk = [];

function fail(message) { $('error').textContent = message ?? ''; $('error').hidden = !message; }

function headers() {
  const key = $('key').value.trim();
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refusal(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server answered ${answer.status}`; }
}

// The model's name; asked for until it comes, and again after a server went away.
async function connect() {
  try {
    const answer = await fetch('/v1/models', { headers: headers() });
    if (!answer.ok) throw new Error(await refusal(answer));
    const first = !model, before = $('drafter').value;
    model = (await answer.json()).data[0];
    const { drafter, drafters, verifier, lossless } = model.speculation;
    $('model').textContent = `${model.id} · drafts: ${drafter ?? 'none'} · rule: ${verifier}${lossless ? ', lossless' : ''}`;
    offer('drafter', drafters, drafters.includes(before) ? before : drafters[0]);
    rules();
    $('tab-chat').disabled = !model.chat;
    fail();
    if (first) choose(model.chat ? 'chat' : 'text');
  } catch (error) {
    $('model').textContent = 'not connected';
    fail(error instanceof TypeError ? 'The server cannot be reached. Trying again …' : error.message);
    setTimeout(connect, 1500);
  }
}

function offer(id, names, chosen) {
  $(id).replaceChildren(...names.map((name) => new Option(name === 'none' ? 'none: plain decoding' : name, name, false, name === chosen)));
}

// Those that are exact for the chosen drafter; the server's own choice first.
function rules() {
  const names = model.speculation.verifiers[$('drafter').value] ?? [];
  offer('verifier', ['auto', ...names], 'auto');
  for (const id of ['verifier', 'depth', 'paths']) $(id).disabled = $('drafter').value === 'none';
}

function lane(name) {
  const box = make('article', `lane ${mode}`), title = make('h2', '', name), figures = make('span', 'figures'), output = make('div', 'output');
  output.setAttribute('role', 'log'); output.setAttribute('aria-label', name); output.tabIndex = 0;
  title.append(figures); box.append(title, output); $('lanes').append(box);
  return { output, figures, tokens: 0, calls: 0, text: '', began: 0 };
}

function choose(wanted) {
  mode = wanted;
  for (const name of ['chat', 'text', 'race']) $(`tab-${name}`).setAttribute('aria-selected', name === mode);
  $('stage').setAttribute('aria-labelledby', `tab-${mode}`);
  clear();
}

function clear() {
  stopping?.abort();
  talk = [];
  $('lanes').replaceChildren();
  $('prompt').value = mode === 'chat' ? '' : TEXT;
  $('prompt').rows = mode === 'chat' ? 2 : 4;
  document.querySelector('.hint').textContent = mode === 'chat' ? 'Enter sends, Esc stops' : 'Ctrl+Enter generates, Esc stops';
  $('prompt').placeholder = mode === 'chat' ? 'Write a message' : 'Text to continue';
  $('go').textContent = { chat: 'Send', text: 'Generate', race: 'Race' }[mode];
  for (const name of mode === 'race' ? ['plain', 'speculative'] : [mode === 'chat' ? 'Conversation' : 'Text']) lane(name);
  draw(null);
}

function body(prompt, drafting) {
  const whole = (id) => ($(id).value === '' ? undefined : Number($(id).value));
  const drafter = $('drafter').value === 'none' ? 'auto' : $('drafter').value, verifier = $('verifier').value || 'auto';
  const sized = { depth: whole('depth'), num_paths: whole('paths'), drafter, verifier };
  const speculation = { enabled: drafting, trace: true, ...(drafting && sized) };
  const told = { model: model.id, stream: true, seed: whole('seed'), temperature: whole('temperature'), max_tokens: whole('tokens'), speculation };
  return mode === 'chat'
    ? { ...told, messages: talk, logprobs: true, top_logprobs: 0 }
    : { ...told, prompt, logprobs: 0 };
}

// Server-sent events of one request, each parsed.
async function* events(path, given, signal) {
  const answer = await fetch(path, { method: 'POST', headers: headers(), body: JSON.stringify(given), signal });
  if (!answer.ok) throw new Error(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '', ended = false; !ended;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError('the stream broke off');
    const lines = (rest + value).split('\n\n');
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, '');
      ended ||= data === '[DONE]';
      if (!ended) yield JSON.parse(data);
    }
  }
}

function show(at, { tokens, tree }) {
  const follows = at.output.scrollHeight - at.output.scrollTop - at.output.clientHeight < 40;
  for (const token of tokens) {
    const drafted = token.source !== 'target';
    const span = make('span', `token ${drafted ? `draft d${Math.min(token.depth, 5)}` : 'target'}`, token.text);
    const chance = token.logprob === undefined ? '' : `, probability ${Math.exp(token.logprob).toPrecision(3)}`;
    span.title = `${drafted ? `drafted by ${token.source}, depth ${token.depth}` : 'written by the target'}${chance}`;
    at.output.append(span);
    at.text += token.text;
  }
  at.tokens += tokens.length;
  at.calls += tree !== null;
  const seconds = (performance.now() - at.began) / 1000;
  at.figures.textContent = `${(at.tokens / seconds).toFixed(0)} tokens/s · ${(at.tokens / Math.max(at.calls, 1)).toFixed(2)} per call`;
  if (follows) at.output.scrollTop = at.output.scrollHeight;
  if (tree && tree.parents.length > 1) draw(tree);
}

async function run(at, prompt, drafting, signal) {
  Object.assign(at, { tokens: 0, calls: 0, text: '', began: performance.now() });
  for await (const event of events(mode === 'chat' ? '/v1/chat/completions' : '/v1/completions', body(prompt, drafting), signal)) {
    if (event.error) throw new Error(event.error.message);
    show(at, event.speculation);
  }
}

async function go() {
  const prompt = $('prompt').value;
  if (stopping || !model || !prompt) return;
  stopping = new AbortController();
  $('go').disabled = true; $('stop').disabled = false;
  fail();
  try {
    if (mode === 'race') await race(prompt);
    else await alone(prompt);
  } catch (error) {
    if (error instanceof TypeError) connect();
    if (error.name !== 'AbortError') fail(error instanceof TypeError ? 'The server went away. Trying again …' : error.message);
  } finally {
    stopping = null;
    $('go').disabled = false; $('stop').disabled = true;
  }
}

async function alone(prompt) {
  if (mode === 'text') { $('lanes').replaceChildren(); lane('Text'); }
  const box = $('lanes').firstChild, at = { output: box.querySelector('.output'), figures: box.querySelector('.figures') };
  at.output.append(make('span', mode === 'chat' ? 'user' : 'said', prompt));
  if (mode === 'chat') { talk.push({ role: 'user', content: prompt }); $('prompt').value = ''; }
  try {
    await run(at, prompt, $('drafter').value !== 'none', stopping.signal);
  } finally {
    if (mode === 'chat' && talk.length) at.text ? talk.push({ role: 'assistant', content: at.text }) : talk.pop();
  }
}

// One after the other: in one batch each would share the other's passes.
async function race(prompt) {
  $('lanes').replaceChildren();
  const plain = lane('plain'), fast = lane('speculative'), { signal } = stopping;
  for (const at of [plain, fast]) at.output.append(make('span', 'said', prompt));
  await run(plain, prompt, false, signal);
  const slow = performance.now() - plain.began;
  await run(fast, prompt, true, signal);
  const ratio = slow / (performance.now() - fast.began);
  fast.figures.textContent += ` · ${ratio.toFixed(2)}x · ${plain.text === fast.text ? 'the same text' : 'another text of the same law'}`;
}

// A round's tree from left to right: depth is the column, leaves share the height.
function draw(tree) {
  const svg = $('tree'), ns = 'http://www.w3.org/2000/svg';
  svg.replaceChildren();
  if (!tree) { svg.setAttribute('aria-label', 'No draft yet'); return; }
  const { texts, parents, path } = tree, kept = new Set([0, ...path]), below = texts.map(() => []), depth = texts.map(() => 0);
  parents.forEach((parent, n) => { if (parent >= 0) { below[parent].push(n); depth[n] = depth[parent] + 1; } });
  const y = []; let leaves = 0;
  (function place(n) { below[n].forEach(place); y[n] = below[n].length ? below[n].reduce((sum, m) => sum + y[m], 0) / below[n].length : leaves++; })(0);
  const columns = Math.max(...depth) + 1, step = Math.max(50, 330 / columns), high = Math.max(leaves * 30, 90);
  svg.setAttribute('viewBox', `0 0 ${columns * step + 20} ${high + 24}`);
  const at = (n) => [12 + depth[n] * step, 22 + (y[n] + 0.5) * (high / Math.max(leaves, 1)) - 6];
  const add = (tag, attributes, on) => {
    const e = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
    if (on) e.setAttribute('class', 'kept');
    svg.append(e);
    return e;
  };
  parents.forEach((parent, n) => {
    if (parent < 0) return;
    const [x0, y0] = at(parent), [x1, y1] = at(n), middle = (x0 + x1) / 2;
    add('path', { d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` }, kept.has(n));
  });
  texts.forEach((text, n) => {
    const [x, top] = at(n);
    add('circle', { cx: x, cy: top, r: 4 }, kept.has(n));
    add('text', { x: x - 4, y: top - 8 }, kept.has(n)).textContent = text.replace(/\n/g, '↵').replace(/ /g, '·').slice(0, 7);
  });
  svg.setAttribute('aria-label', `${texts.length - 1} drafted tokens, ${path.length} accepted`);
}

for (const name of ['chat', 'text', 'race']) $(`tab-${name}`).addEventListener('click', () => choose(name));
document.querySelector('nav').addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...event.currentTarget.querySelectorAll('button:enabled')];
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus(); next.click();
});
$('drafter').addEventListener('change', rules);
$('ask').addEventListener('submit', (event) => { event.preventDefault(); go(); });
$('controls').addEventListener('submit', (event) => event.preventDefault());
$('key').addEventListener('change', connect);
$('stop').addEventListener('click', () => stopping?.abort());
$('clear').addEventListener('click', clear);
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') stopping?.abort();
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey || (mode === 'chat' && event.target === $('prompt') && !event.shiftKey))) { event.preventDefault(); go(); }
});
connect();
