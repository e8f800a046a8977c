// Reads a streamed answer: server-sent events of one JSON chunk each, and an end that has to be said.

/** The answer ended before its end; the message says how. */
export class Cut extends Error {}

/** The chunks of a stream, until `[DONE]`.

Throws Cut when the connection breaks, when the stream stops without `[DONE]`, or when the server reports an error in it. */
export async function* chunks(response) {
	for await (const data of events(response.body)) {
		if (data === "[DONE]") return;
		let chunk;
		try {
			chunk = JSON.parse(data);
		} catch {
			throw new Cut("The server sent what is no JSON.");
		}
		if (chunk.error) throw new Cut(chunk.error.message ?? "The server reported an error.");
		yield chunk;
	}
	throw new Cut("The answer stopped before its end.");
}

async function* events(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { done, value } = await piece(reader);
			if (done) return;
			const lines = (rest + value).split(/\r?\n/);
			rest = lines.pop();
			for (const line of lines) {
				// Lines that begin with a colon are pings.
				if (line.startsWith("data:")) yield line.slice(5).trim();
			}
		}
	} finally {
		await reader.cancel().catch(() => {});
	}
}

async function piece(reader) {
	try {
		return await reader.read();
	} catch (error) {
		// Stop is an AbortError; anything else is the network.
		throw error.name === "AbortError" ? error : new Cut("The connection to the server broke.");
	}
}
