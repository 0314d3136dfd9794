package main

import (
	"bufio"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"

	"golang.org/x/net/http2"
)

// runNativeAgent is an agent of the native transport, until the server leaves or
// its own input ends. The line "drain" on its input makes it say so to the server.
func runNativeAgent(args []string) (result, error) {
	fs := flag.NewFlagSet("native-agent", flag.ContinueOnError)
	var f nativeFlags
	f.add(fs)
	id := fs.String("id", "go", "agent id")
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	config, err := f.tls()
	if err != nil {
		return nil, err
	}
	conn, err := tls.Dial("tcp", f.addr, config)
	if err != nil {
		return nil, err
	}
	if got := conn.ConnectionState().NegotiatedProtocol; got != nativeALPN {
		return nil, fmt.Errorf("the server chose %q", got)
	}
	in := bufio.NewReader(conn)
	r, err := introduce(conn, in, *id)
	if err != nil {
		return r, err
	}
	emit(r)
	agent := nativeAgent{drain: make(chan struct{})}
	go agent.listen()
	(&http2.Server{}).ServeConn(&aheadConn{conn, in}, &http2.ServeConnOpts{Handler: &agent})
	return nil, errors.New("the server left")
}

// introduce says who the agent is, and returns what the server says of itself.
func introduce(conn net.Conn, in *bufio.Reader, id string) (result, error) {
	request := http.Request{
		Method: http.MethodGet, URL: &url.URL{Path: "/agent"}, Host: "culvert",
		Header: http.Header{
			"Connection": {"upgrade"}, "Upgrade": {nativeALPN},
			"agentid": {id}, "agentidentifiers": {""},
		},
	}
	if err := request.Write(conn); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(in, &request)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(answer.Body)
		return nil, fmt.Errorf("%s: %s", answer.Status, text)
	}
	if got := answer.Header.Get("Upgrade"); got != nativeALPN {
		return nil, fmt.Errorf("upgrade to %q", got)
	}
	return result{
		"event": "connected", "serverid": answer.Header.Get("serverid"),
		"servercount": answer.Header.Get("servercount"),
	}, nil
}

type nativeAgent struct{ drain chan struct{} }

func (a *nativeAgent) listen() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if lines.Text() == nativeDrain {
			close(a.drain)
		}
	}
	finish(nil, nil)
}

func (a *nativeAgent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect:
		connect(w, r)
	case r.Method == http.MethodGet && r.URL.Path == nativeControl:
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-a.drain:
			_, _ = fmt.Fprintln(w, nativeDrain)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case <-r.Context().Done():
		}
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// connect carries one connection. This library has no word for the end of a
// response while the request goes on, so that an endpoint's half close ends both.
func connect(w http.ResponseWriter, r *http.Request) {
	dialed, err := net.Dial("tcp", r.Host)
	if err != nil {
		w.Header().Set(nativeError, url.PathEscape(err.Error()))
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	endpoint := dialed.(*net.TCPConn)
	defer endpoint.Close()
	w.WriteHeader(http.StatusOK)
	controller := http.NewResponseController(w)
	_ = controller.Flush()
	go func() {
		if _, err := io.Copy(endpoint, r.Body); err != nil {
			// The server gave the connection up.
			endpoint.Close()
			return
		}
		_ = endpoint.CloseWrite()
	}()
	buf := make([]byte, chunk)
	for {
		n, err := endpoint.Read(buf)
		if _, failed := w.Write(buf[:n]); failed != nil {
			return
		}
		_ = controller.Flush()
		if err != nil {
			return
		}
	}
}
