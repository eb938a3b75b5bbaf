// What is chosen on the page: model, what to do with it, sampling, drafts, colours. Settings stay in the browser, but for the key.

import { $ } from './dom.js';
import { read, write } from './storage.js';

const STORED = ['system', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'tokens', 'theme'];
const TEXT_TOKENS = 256; // of a text without a limit: base models do not end by themselves

export const chosen = { mode: 'text', models: [], model: null };

export const onChat = () => chosen.mode === 'chat' || (chosen.mode === 'race' && chosen.model.chat);
export const number = (id) => ($(id).value === '' ? undefined : Number($(id).value));
export const drafts = () => $('drafter').value !== 'none';

function offer(id, names, choice) {
  $(id).replaceChildren(...names.map((name) => new Option(name === 'none' ? 'none: plain decoding' : name, name, false, name === choice)));
}

// What is known of the chosen model; nothing but its name before it is loaded.
export function describe() {
  chosen.model = chosen.models.find(({ id }) => id === $('models').value) ?? chosen.models[0];
  const { speculation, chat } = chosen.model;
  const { drafter, drafters = [], verifier, lossless } = speculation ?? {};
  const told = `drafts: ${drafter ?? 'none'} · verifier: ${verifier}${lossless ? ', lossless' : ''}`;
  $('model').textContent = speculation ? told : 'loads with the first request';
  const before = $('drafter').value;
  offer('drafter', drafters, drafters.includes(before) ? before : drafters[0]);
  verifiers();
  $('tab-chat').disabled = chat === false;
}

// Those that are exact for the chosen drafter; the server's own choice first.
export function verifiers() {
  const names = chosen.model.speculation?.verifiers[$('drafter').value] ?? [];
  offer('verifier', ['auto', ...names], 'auto');
  for (const id of ['verifier', 'depth', 'paths']) $(id).disabled = !drafts();
}

export function limits() {
  $('tokens').placeholder = onChat() ? 'rest of the context' : `${TEXT_TOKENS}`;
  $('system').disabled = !onChat();
}

function speculation(drafting) {
  if (!drafting) return { enabled: false, trace: true };
  const drafter = drafts() && $('drafter').value ? $('drafter').value : 'auto';
  const verifier = $('verifier').value || 'auto';
  return { enabled: true, trace: true, depth: number('depth'), num_paths: number('paths'), drafter, verifier };
}

// The body of a request. content: messages of a chat, or a text.
export function asked(content, drafting, seed) {
  const request = {
    model: chosen.model.id,
    stream: true,
    temperature: number('temperature') ?? (chosen.mode === 'race' ? 0 : undefined),
    top_p: number('top_p'),
    top_k: number('top_k'),
    min_p: number('min_p'),
    seed,
    max_tokens: number('tokens') ?? (onChat() ? undefined : TEXT_TOKENS),
    speculation: speculation(drafting),
  };
  if (!onChat()) return { ...request, prompt: content, logprobs: 0 };
  const system = $('system').value.trim();
  const messages = system ? [{ role: 'system', content: system }, ...content] : content;
  return { ...request, messages, continue_final_message: content.at(-1).role === 'assistant', logprobs: true, top_logprobs: 0 };
}

function paint() {
  if ($('theme').value) document.documentElement.dataset.theme = $('theme').value;
  else delete document.documentElement.dataset.theme;
}

// From now on changes are kept.
export function restore() {
  const kept = read('local') ?? {};
  for (const id of STORED) {
    $(id).value = kept[id] ?? '';
    $(id).addEventListener('change', () => write('local', '', Object.fromEntries(STORED.map((name) => [name, $(name).value]))));
  }
  $('theme').addEventListener('change', paint);
  paint();
}
