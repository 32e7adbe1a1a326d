// The operations of a page's compute worker over llama.h, for edge/browser/static/worker.js. One model and one context.
// Functions return a negative number on failure; `shim_error` then says why. Arguments are checked here, because
// llama.cpp ends the whole module on many invalid ones.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <emscripten.h>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

// The worker's scripts define these. `beat` shows the page that a long computation is alive.
EM_JS(void, page_beat, (), { Module.onBeat(); });
EM_JS(void, page_loading, (float fraction), { Module.onLoading(fraction); });

namespace {

constexpr int FAILED = -1000;  // other negative codes are llama.cpp's
constexpr int STOPPED = 2;     // llama_decode's code after the abort callback stopped it
// Bytes of a buffer of llama.cpp. emscripten's malloc refuses 2 GiB and more at once.
constexpr size_t MOST_BUFFER = size_t(2000) << 20;

struct Hook {  // nodes of the graph to write and to read, during one decode
    const char * write = "";
    const char * stop_at = "";
    const float * embeddings = nullptr;
    int width = 0, rows = 0;
    bool wrote = false;
    std::string problem;
};

llama_model * model;
llama_context * context;
ggml_threadpool * pool;
std::atomic<int32_t> stop_flag;
std::chrono::steady_clock::time_point last_beat;
std::string error_text, log_text, meta_text;
Hook hook;
std::vector<float> values;
int value_rows, value_width;
int most_threads, most_outputs;

int fail(const std::string & text) {
    error_text = text;
    return FAILED;
}

std::string with_log(const std::string & text) { return log_text.empty() ? text : text + ": " + log_text; }

// Calls `action`, and turns an exception into an error.
template <class Action> int guarded(Action action) {
    log_text.clear();
    try {
        return action();
    } catch (const std::exception & error) {
        return fail(with_log(error.what()));
    } catch (...) {
        return fail(with_log("unknown exception"));
    }
}

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_WARN) return;
    std::string line(text);
    std::replace(line.begin(), line.end(), '\n', ' ');
    while (!line.empty() && line.back() == ' ') line.pop_back();
    if (line.empty() || log_text.size() > 500) return;
    log_text += (log_text.empty() ? "" : "; ") + line;
}

void on_assert(const char * text) { error_text = text; }  // ggml ends the module after this

void beat() {
    auto now = std::chrono::steady_clock::now();
    if (now - last_beat < std::chrono::milliseconds(500)) return;
    last_beat = now;
    page_beat();
}

bool on_abort(void *) {
    beat();
    return stop_flag.load(std::memory_order_relaxed) != 0;
}

bool on_progress(float fraction, void *) {
    beat();
    page_loading(fraction);
    return stop_flag.load(std::memory_order_relaxed) == 0;
}

bool stop_with(const std::string & problem) {
    hook.problem = problem;
    return false;
}

// Evaluation callback. Returning false after a node was computed ends the graph there.
bool on_node(ggml_tensor * node, bool ask, void *) {
    const char * name = ggml_get_name(node);
    bool writes = *hook.write && !strcmp(name, hook.write), stops = *hook.stop_at && !strcmp(name, hook.stop_at);
    if (ask) return writes || stops;
    if (writes) {
        if (node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node) || node->ne[0] != hook.width ||
            ggml_nelements(node) != int64_t(hook.width) * hook.rows)
            return stop_with(std::string("the embeddings do not fit the node ") + hook.write);
        ggml_backend_tensor_set(node, hook.embeddings, 0, ggml_nbytes(node));
        hook.wrote = true;
    }
    if (stops) {
        if (node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node))
            return stop_with(std::string("the node ") + hook.stop_at + " does not hold plain F32 values");
        values.resize(ggml_nelements(node));
        ggml_backend_tensor_get(node, values.data(), 0, ggml_nbytes(node));
        value_width = node->ne[0];
        value_rows = values.size() / value_width;
        return false;
    }
    return true;
}

bool is_sequence(int sequence) { return sequence >= 0 && sequence < int(llama_n_seq_max(context)); }

}  // namespace

extern "C" {

EMSCRIPTEN_KEEPALIVE const char * shim_error() { return error_text.c_str(); }

// Returns the address of an int32 that other threads set to stop a computation.
EMSCRIPTEN_KEEPALIVE int32_t * shim_stop_flag() { return reinterpret_cast<int32_t *>(&stop_flag); }

// Starts the module with its threads, which live as long as the module.
EMSCRIPTEN_KEEPALIVE int shim_start(int threads) {
    return guarded([=] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_assert);
        llama_backend_init();
        // llama.cpp divides weights into buffers of this size.
        ggml_backend_cpu_buffer_type()->iface.get_max_size = [](ggml_backend_buffer_type_t) { return MOST_BUFFER; };
        most_threads = threads;
        if (threads > 1) {
            auto params = ggml_threadpool_params_default(threads);
            pool = ggml_threadpool_new(&params);
            if (!pool) return fail("cannot start the threads");
        }
        return 0;
    });
}

// Loads a model and makes a context.
EMSCRIPTEN_KEEPALIVE int shim_load(const char * path, int n_ctx, int n_batch, int n_seq_max, int n_outputs_max,
                                   int n_rs_seq, int type_k, int type_v, int flash) {
    return guarded([=] {
        if (model) return fail("a model is loaded already; unload it first");
        for (int type : {type_k, type_v})
            if (type < 0 || type >= GGML_TYPE_COUNT || !ggml_blck_size(ggml_type(type)))
                return fail("unknown cache type " + std::to_string(type));
        if (n_ctx < 1 || n_batch < 1 || n_seq_max < 1 || n_seq_max > int(llama_max_parallel_sequences()) ||
            n_outputs_max < 1 || n_rs_seq < 0 || flash < -1 || flash > 1)
            return fail("a size of the context is out of range");
        auto model_params = llama_model_default_params();
        model_params.load_mode = LLAMA_LOAD_MODE_NONE;
        model_params.n_gpu_layers = 0;
        model_params.use_extra_bufts = false;
        model_params.progress_callback = on_progress;
        model = llama_model_load_from_file(path, model_params);
        if (!model) return fail(stop_flag ? "stopped" : with_log("llama.cpp cannot load this slice"));
        auto params = llama_context_default_params();
        params.n_ctx = n_ctx;
        params.n_batch = params.n_ubatch = n_batch;
        params.n_seq_max = n_seq_max;
        params.n_outputs_max = most_outputs = std::max(n_outputs_max, n_seq_max);  // ggml ends the module on fewer
        params.n_rs_seq = n_rs_seq;
        params.n_threads = params.n_threads_batch = most_threads;
        params.type_k = ggml_type(type_k);
        params.type_v = ggml_type(type_v);
        params.flash_attn_type = llama_flash_attn_type(flash);
        params.kv_unified = true;
        params.cb_eval = on_node;
        params.abort_callback = on_abort;
        context = llama_init_from_model(model, params);
        if (!context) {
            llama_model_free(model);
            model = nullptr;
            return fail(with_log("llama.cpp cannot make a context of " + std::to_string(n_ctx) + " tokens"));
        }
        if (pool) llama_attach_threadpool(context, pool, pool);
        return 0;
    });
}

// Returns a text of the model's metadata; "" if it has none.
EMSCRIPTEN_KEEPALIVE const char * shim_meta(const char * key) {
    char text[256] = "";
    llama_model_meta_val_str(model, key, text, sizeof text);
    meta_text = text;
    return meta_text.c_str();
}

// Returns facts of the model and of the context as JSON.
EMSCRIPTEN_KEEPALIVE const char * shim_facts() {
    static char text[512];
    auto flag = [](bool value) { return value ? "true" : "false"; };
    snprintf(text, sizeof text,
             "{\"model\":{\"n_vocab\":%d,\"n_bytes\":%.0f,\"has_decoder\":%s,\"is_recurrent\":%s,\"is_hybrid\":%s,"
             "\"n_swa\":%d,\"rope_type\":%d,\"n_embd\":%d,\"n_embd_inp\":%d,\"n_embd_out\":%d},"
             "\"context\":{\"n_ctx\":%u,\"n_rs_seq\":%u,\"can_shift\":%s}}",
             llama_vocab_n_tokens(llama_model_get_vocab(model)), double(llama_model_size(model)),
             flag(llama_model_has_decoder(model)), flag(llama_model_is_recurrent(model)),
             flag(llama_model_is_hybrid(model)), llama_model_n_swa(model), int(llama_model_rope_type(model)),
             llama_model_n_embd(model), llama_model_n_embd_inp(model), llama_model_n_embd_out(model),
             llama_n_ctx(context), llama_n_rs_seq(context), flag(llama_memory_can_shift(llama_get_memory(context))));
    return text;
}

// Computes n rows, and returns llama_decode's code. `shim_values`, `shim_rows` and `shim_width` are the result.
// tokens, embeddings: either may be null. write: "" or the node over whose value the embeddings are written.
// stop_at: "" or the node whose value is the result, and after which the graph ends. Without it logits are the result.
EMSCRIPTEN_KEEPALIVE int shim_decode(int n, llama_token * tokens, float * embeddings, int width, llama_pos * positions,
                                     llama_seq_id * sequences, int8_t * outputs, const char * write,
                                     const char * stop_at, int threads) {
    value_rows = value_width = 0;
    return guarded([=] {
        if (!context) return fail("no model is loaded");
        if (n < 1 || n > int(llama_n_batch(context)))
            return fail(std::to_string(n) + " rows, of 1 to " + std::to_string(llama_n_batch(context)));
        if (!tokens && !embeddings) return fail("the rows have neither tokens nor embeddings");
        if (*write && !embeddings) return fail(std::string("there are no embeddings for the node ") + write);
        if (!tokens && width != llama_model_n_embd_inp(model))
            return fail("embeddings of " + std::to_string(width) + " values, the model takes " +
                        std::to_string(llama_model_n_embd_inp(model)));
        int n_outputs = 0;
        std::vector<int32_t> ones(n, 1);
        std::vector<llama_seq_id *> places(n);
        for (int i = 0; i < n; i++) {
            if (!is_sequence(sequences[i])) return fail("no sequence " + std::to_string(sequences[i]));
            places[i] = sequences + i;
            n_outputs += outputs[i] != 0;
        }
        if (n_outputs > most_outputs)
            return fail(std::to_string(n_outputs) + " rows with outputs, more than n_outputs_max");
        if (stop_flag) return STOPPED;
        hook = Hook{write, stop_at, embeddings, width, n, false, ""};
        int use = threads < 1 || threads > most_threads ? most_threads : threads;
        llama_set_n_threads(context, use, use);
        llama_batch batch{n,           tokens,        tokens ? nullptr : embeddings, positions,
                          ones.data(), places.data(), outputs};
        int code = llama_decode(context, batch);
        std::string problem = hook.problem;
        bool wrote = hook.wrote;
        hook = Hook{};
        if (!problem.empty()) return fail(problem);
        if (code) {
            error_text = log_text;
            return code;
        }
        if (*write && !wrote) return fail(std::string("the graph has no node ") + write);
        if (*stop_at && !value_rows) return fail(std::string("the graph has no node ") + stop_at);
        if (!*stop_at && n_outputs) {
            value_rows = n_outputs;
            value_width = llama_vocab_n_tokens(llama_model_get_vocab(model));
            const float * logits = llama_get_logits(context);
            if (!logits) return fail("llama.cpp gave no logits");
            values.assign(logits, logits + size_t(value_rows) * value_width);
        }
        return 0;
    });
}

EMSCRIPTEN_KEEPALIVE const float * shim_values() { return values.data(); }
EMSCRIPTEN_KEEPALIVE int shim_rows() { return value_rows; }
EMSCRIPTEN_KEEPALIVE int shim_width() { return value_width; }

// Operations on the KV cache, one for one those of llama.h. A sequence of -1 is refused: the bridge never needs it.

EMSCRIPTEN_KEEPALIVE int shim_seq_rm(int sequence, int start, int end) {
    return guarded([=] {
        if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        return int(llama_memory_seq_rm(llama_get_memory(context), sequence, start, end));
    });
}

EMSCRIPTEN_KEEPALIVE int shim_seq_cp(int source, int target, int start, int end) {
    return guarded([=] {
        for (int sequence : {source, target})
            if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        llama_memory_seq_cp(llama_get_memory(context), source, target, start, end);
        return 0;
    });
}

EMSCRIPTEN_KEEPALIVE int shim_seq_add(int sequence, int start, int end, int delta) {
    return guarded([=] {
        if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        auto memory = llama_get_memory(context);
        if (!llama_memory_can_shift(memory)) return fail("this model's KV cache cannot shift positions");
        llama_memory_seq_add(memory, sequence, start, end, delta);
        return 0;
    });
}

EMSCRIPTEN_KEEPALIVE int shim_clear() {
    return guarded([=] {
        if (!context) return fail("no model is loaded");
        llama_memory_clear(llama_get_memory(context), true);
        return 0;
    });
}

// Returns the first or the last position of a sequence; -1 if it has none.
EMSCRIPTEN_KEEPALIVE int shim_end(int sequence, int last) {
    return guarded([=] {
        if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        auto memory = llama_get_memory(context);
        return last ? llama_memory_seq_pos_max(memory, sequence) : llama_memory_seq_pos_min(memory, sequence);
    });
}

// Returns the bytes of a sequence's state.
EMSCRIPTEN_KEEPALIVE int shim_state_size(int sequence, uint32_t flags) {
    return guarded([=] {
        if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        return int(llama_state_seq_get_size_ext(context, sequence, flags));
    });
}

EMSCRIPTEN_KEEPALIVE int shim_state_get(uint8_t * data, uint32_t size, int sequence, uint32_t flags) {
    return guarded([=] {
        if (llama_state_seq_get_data_ext(context, data, size, sequence, flags) != size)
            return fail(with_log("llama.cpp cannot write the state of sequence " + std::to_string(sequence)));
        return 0;
    });
}

// Returns the bytes that llama.cpp read: 0 if the state does not fit.
EMSCRIPTEN_KEEPALIVE int shim_state_set(const uint8_t * data, uint32_t size, int sequence, uint32_t flags) {
    return guarded([=] {
        if (!context || !is_sequence(sequence)) return fail("no sequence " + std::to_string(sequence));
        return int(llama_state_seq_set_data_ext(context, data, size, sequence, flags));
    });
}

// Returns the products per second of a Q4_0 matrix of k * rows weights with `columns` columns; -1 without memory for it.
EMSCRIPTEN_KEEPALIVE double shim_products_per_s(int k, int rows, int columns, double seconds) {
    std::vector<uint8_t> memory, work;
    ggml_context * ggml = nullptr;
    double result = -1;
    guarded([&] {
        size_t values_bytes = 4 * (size_t(k) + rows) * columns;
        memory.resize(ggml_row_size(GGML_TYPE_Q4_0, k) * rows + values_bytes + (1 << 20));
        ggml = ggml_init({memory.size(), memory.data(), false});
        if (!ggml) return fail("no memory to measure");
        ggml_tensor * weights = ggml_new_tensor_2d(ggml, GGML_TYPE_Q4_0, k, rows);
        ggml_tensor * input = ggml_new_tensor_2d(ggml, GGML_TYPE_F32, k, columns);
        memset(weights->data, 0x11, ggml_nbytes(weights));
        ggml_set_f32(input, 0.5f);
        ggml_cgraph * graph = ggml_new_graph(ggml);
        ggml_build_forward_expand(graph, ggml_mul_mat(ggml, weights, input));
        auto plan = ggml_graph_plan(graph, most_threads, pool);
        work.resize(plan.work_size);
        plan.work_data = work.data();
        ggml_graph_compute(graph, &plan);  // the first pass touches the memory
        // The best pass counts: others include what the device did besides.
        double best = 1e9, spent = 0;
        while (spent < seconds) {
            auto begin = std::chrono::steady_clock::now();
            ggml_graph_compute(graph, &plan);
            double pass = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            best = std::min(best, std::max(pass, 1e-6));
            spent += std::max(pass, 1e-6);
            beat();
        }
        result = 1 / best;
        return 0;
    });
    if (ggml) ggml_free(ggml);
    return result;
}

}  // extern "C"
