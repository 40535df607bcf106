// node client.js "A prompt" [max_tokens]: asks the cache service which worker has most of the prompt, and streams from that one.
// Addresses come from STEMCACHE_CACHE (127.0.0.1:7400) and STEMCACHE_WORKERS (127.0.0.1:7500,127.0.0.1:7501).
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const ROOT = path.join(__dirname, "..", "..");
const definition = protoLoader.loadSync(["protos/v1/cache.proto", "protos/v1/worker.proto"], {
  includeDirs: [ROOT],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
});
const { PrefixCache, ModelWorker } = grpc.loadPackageDefinition(definition).stemcache.v1;

// Prompts may be large; the services take up to 64 MiB.
const OPTIONS = { "grpc.max_receive_message_length": 64 * 2 ** 20, "grpc.max_send_message_length": 64 * 2 ** 20 };
const CREDENTIALS = grpc.credentials.createInsecure();

const seconds = (count) => ({ deadline: Date.now() + count * 1000 });

// A unary call as a promise; a failed one rejects with the status (error.code, error.details).
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, seconds(30), (error, response) => (error ? reject(error) : resolve(response)));
  });
}

// The address of the worker that has most of the prompt; the first that answers when the cache service is away.
async function pickWorker(cache, workers, text) {
  const described = await Promise.allSettled(workers.map((worker) => call(worker.client, "Describe", {})));
  const alive = workers
    .map((worker, at) => ({ ...worker, about: described[at].value }))
    .filter((worker) => worker.about && !worker.about.draining);
  if (alive.length === 0) throw described[0].reason;
  try {
    // Token ids travel as packed little-endian int32: proto-loader gives them as a Buffer, as Match wants them.
    const { namespace, token_ids } = await call(alive[0].client, "Tokenize", { text });
    const matched = await call(cache, "Match", { namespace, tokens: token_ids });
    const within = Object.fromEntries(
      matched.workers.map((one) => [one.worker_id, one.match.usable_tokens + one.match.host_tokens]),
    );
    const load = (worker) => worker.about.num_running + worker.about.num_waiting;
    const score = (worker) => within[worker.about.worker_id] ?? -1;
    alive.sort((a, b) => score(b) - score(a) || load(a) - load(b));
  } catch (error) {
    console.error(`no advice from the cache service: ${error.details}`);
  }
  return alive[0];
}

async function main() {
  const [text, maxTokens = "64"] = process.argv.slice(2);
  if (text === undefined) throw new Error('usage: node client.js "A prompt" [max_tokens]');
  const cache = new PrefixCache(process.env.STEMCACHE_CACHE ?? "127.0.0.1:7400", CREDENTIALS, OPTIONS);
  const workers = (process.env.STEMCACHE_WORKERS ?? "127.0.0.1:7500,127.0.0.1:7501")
    .split(",")
    .map((address) => ({ address, client: new ModelWorker(address, CREDENTIALS, OPTIONS) }));

  const worker = await pickWorker(cache, workers, text);
  const stream = worker.client.Generate({ text, sampling: { max_tokens: Number(maxTokens) } }, seconds(300));
  // Ctrl-C aborts the request on the worker, too.
  process.once("SIGINT", () => stream.cancel());
  for await (const response of stream) {
    process.stdout.write(response.text);
    if (response.usage) {
      const { prompt_tokens, cached_tokens, fetched_tokens, computed_tokens } = response.usage;
      console.log(
        `\n${worker.about.worker_id}: ${prompt_tokens} prompt tokens: ${cached_tokens} cached, ` +
          `${fetched_tokens} fetched, ${computed_tokens} computed`,
      );
    }
  }
  for (const { client } of workers) client.close();
  cache.close();
}

main().catch((error) => {
  console.error(error.details ? `${grpc.status[error.code]}: ${error.details}` : error.message);
  process.exitCode = 1;
});
